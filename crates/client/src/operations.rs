//! Calls about plans and operations.

use std::time::Duration;

use gpush_api::{ApplyRequest, Operation, OperationSummary, PlanRequest, Plans};

use crate::{client::Client, error::Error, path_segment::segment, question::Question};

/// Maximum number of operations in one request.
const PAGE: usize = 200;

impl Client {
    /// `POST /v1/mig/plan`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn plan(&mut self, request: &PlanRequest) -> Result<Plans, Error> {
        self.post("/v1/mig/plan", request, None).await
    }

    /// `POST /v1/mig/apply`. Returns the operation as soon as it has begun.
    ///
    /// The request has an idempotency key, and the client repeats the request while gpushd may be restarting.
    /// Nevertheless, only one operation begins.
    ///
    /// # Errors
    /// See [`crate::Kind`]. After [`crate::Kind::Lost`] and [`crate::Kind::TimedOut`] the operation may have begun.
    pub async fn apply(&mut self, request: &ApplyRequest) -> Result<Operation, Error> {
        self.change("/v1/mig/apply", request).await
    }

    /// `POST /v1/operations/{id}/cancel`. Returns immediately; the operation ends later.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::Conflict`] if the operation has already ended.
    pub async fn cancel(&mut self, id: &str) -> Result<Operation, Error> {
        self.change(&format!("/v1/operations/{}/cancel", segment(id)), &()).await
    }

    /// `GET /v1/operations`. Returns the last `most` operations, oldest first. With `before`,
    /// returns the last operations before the operation `before`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn last_operations(&mut self, most: usize, before: Option<&str>) -> Result<Vec<OperationSummary>, Error> {
        let mut all: Vec<OperationSummary> = Vec::new();
        let mut before = before.map(str::to_owned);
        while all.len() < most {
            let limit = PAGE.min(most - all.len());
            let from = before.as_deref().map_or_else(String::new, |id| format!("&before={}", segment(id)));
            let mut page: Vec<OperationSummary> = self.get(&format!("/v1/operations?limit={limit}{from}")).await?;
            let full = page.len() == limit;
            page.append(&mut all);
            all = page;
            before = all.first().map(|first| first.id.clone());
            if !full {
                break;
            }
        }
        Ok(all)
    }

    /// `GET /v1/operations/{id}`.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn operation(&mut self, id: &str) -> Result<Operation, Error> {
        self.get(&format!("/v1/operations/{}", segment(id))).await
    }

    /// Returns the operation as soon as its revision exceeds `after`. If that takes longer than
    /// `wait`, returns the operation in its current state.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn operation_after(&mut self, id: &str, after: u64, wait: Duration) -> Result<Operation, Error> {
        let path = format!("/v1/operations/{}?after={after}&wait_ms={}", segment(id), wait.as_millis());
        let question = Question { reports_slow: false, ..Question::get(&path) };
        let answer = self.wire.ask(&question, wait + self.deadline).await?;
        self.decode(&question, &answer).await
    }
}
