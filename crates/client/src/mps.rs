//! Calls about MPS daemons and processes on GPUs.
//!
//! A target is given in any form that a user may type: the index of a GPU, `0:2g.20gb@2`, a short name, a UUID, or the
//! prefix of a UUID. gpushd finds the target from this text.

use gpush_api::{GpuProcesses, MpsActionRequest, MpsDaemon, MpsLogs, MpsSetRequest, MpsSetResponse};
use serde::{Serialize, de::DeserializeOwned};

use crate::{client::Client, error::Error, leases::EmptyBody, path_segment::segment};

impl Client {
    /// `GET /v1/mps`. Returns every target that is shared through MPS.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn mps(&mut self) -> Result<Vec<MpsDaemon>, Error> {
        self.get("/v1/mps").await
    }

    /// `GET /v1/mps/{target}`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn mps_daemon(&mut self, target: &str) -> Result<MpsDaemon, Error> {
        self.get(&format!("/v1/mps/{}", segment(target))).await
    }

    /// `POST /v1/mps/{target}/start`. Returns the daemon immediately after the request was accepted.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn mps_start(&mut self, target: &str) -> Result<MpsDaemon, Error> {
        self.on_target(target, "start", &EmptyBody {}).await
    }

    /// `POST /v1/mps/{target}/stop`. Returns the daemon immediately after the request was accepted.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::Blocked`] if the daemon has clients, unless `how` ends them.
    pub async fn mps_stop(&mut self, target: &str, how: &MpsActionRequest) -> Result<MpsDaemon, Error> {
        self.on_target(target, "stop", how).await
    }

    /// `POST /v1/mps/{target}/restart`. Returns the daemon immediately after the request was accepted.
    ///
    /// # Errors
    /// As [`Client::mps_stop`].
    pub async fn mps_restart(&mut self, target: &str, how: &MpsActionRequest) -> Result<MpsDaemon, Error> {
        self.on_target(target, "restart", how).await
    }

    /// `POST /v1/mps/{target}/drain`. Returns the daemon immediately after the request was accepted.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn mps_drain(&mut self, target: &str, how: &MpsActionRequest) -> Result<MpsDaemon, Error> {
        self.on_target(target, "drain", how).await
    }

    /// `POST /v1/mps/{target}/settings`. Returns the effective settings.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn mps_set(&mut self, target: &str, settings: &MpsSetRequest) -> Result<MpsSetResponse, Error> {
        self.on_target(target, "settings", settings).await
    }

    /// `GET /v1/mps/{target}/logs`. Returns the last lines of each of the daemon's logs. With `all`, includes the lines
    /// that gpushd's own queries cause.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn mps_logs(&mut self, target: &str, lines: usize, all: bool) -> Result<MpsLogs, Error> {
        let all = if all { "&all=true" } else { "" };
        self.get(&format!("/v1/mps/{}/logs?lines={lines}{all}", segment(target))).await
    }

    /// `GET /v1/processes`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn processes(&mut self) -> Result<GpuProcesses, Error> {
        self.get("/v1/processes").await
    }

    async fn on_target<B: Serialize, T: DeserializeOwned>(
        &mut self,
        target: &str,
        what: &str,
        body: &B,
    ) -> Result<T, Error> {
        self.change(&format!("/v1/mps/{}/{what}", segment(target)), body).await
    }
}
