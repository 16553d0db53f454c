//! Calls about the config and overrides.

use gpush_api::{ConfigDiff, ConfigView, OverrideEnded, Overrides, ReloadRequest, Reloaded};

use crate::{client::Client, error::Error, path_segment::segment, question::Question};

impl Client {
    /// `GET /v1/config`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn config(&mut self) -> Result<ConfigView, Error> {
        self.get("/v1/config").await
    }

    /// `GET /v1/config/diff`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn config_diff(&mut self) -> Result<ConfigDiff, Error> {
        self.get("/v1/config/diff").await
    }

    /// `POST /v1/config/reload`.
    ///
    /// # Errors
    /// See [`crate::Kind`]. After [`crate::Kind::Lost`] and [`crate::Kind::TimedOut`] the new config may be active.
    pub async fn reload(&mut self, request: &ReloadRequest) -> Result<Reloaded, Error> {
        self.change("/v1/config/reload", request).await
    }

    /// `GET /v1/overrides`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn overrides(&mut self) -> Result<Overrides, Error> {
        self.get("/v1/overrides").await
    }

    /// `DELETE /v1/overrides/{index|uuid|pci}`.
    ///
    /// # Errors
    /// See [`crate::Kind`]. After [`crate::Kind::Lost`] and [`crate::Kind::TimedOut`] the override may have ended.
    pub async fn end_override(&mut self, gpu: &str) -> Result<OverrideEnded, Error> {
        let path = format!("/v1/overrides/{}", segment(gpu));
        // Send no key, so that an unanswered request is not repeated: a repeated request would report that there is no
        // override.
        let question = Question { method: "DELETE", ..Question::get(&path) };
        let answer = self.ask(&question).await?;
        self.decode(&question, &answer).await
    }
}
