//! Requests about the device access of login sessions.

use std::time::Duration;

use gpush_api::{AdministratorScope, DeviceEnforcement, EnforcementPlan, EnforcementRequest};

use crate::{Client, Error};

/// Minimum time limit for a change: systemd changes units, and gpushd runs probes.
const CHANGING: Duration = Duration::from_secs(120);

impl Client {
    /// `GET /v1/enforcement`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn enforcement(&mut self) -> Result<DeviceEnforcement, Error> {
        self.get("/v1/enforcement").await
    }

    /// `GET /v1/enforcement/plan`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn enforcement_plan(&mut self) -> Result<EnforcementPlan, Error> {
        self.get("/v1/enforcement/plan").await
    }

    /// `POST /v1/enforcement/on`. Returns the device access after the change.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn enforcement_on(&mut self, request: &EnforcementRequest) -> Result<DeviceEnforcement, Error> {
        let deadline = self.deadline.max(CHANGING);
        self.change_within("/v1/enforcement/on", request, deadline).await
    }

    /// `POST /v1/enforcement/off`. Returns the device access after the change.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn enforcement_off(&mut self, request: &EnforcementRequest) -> Result<DeviceEnforcement, Error> {
        let deadline = self.deadline.max(CHANGING);
        self.change_within("/v1/enforcement/off", request, deadline).await
    }

    /// `POST /v1/enforcement/shell`. Moves this process out of its login session.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn leave_session(&mut self) -> Result<AdministratorScope, Error> {
        self.change("/v1/enforcement/shell", &serde_json::json!({})).await
    }
}
