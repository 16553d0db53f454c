//! Operations of a gpushd under test: start, follow, cancel.

use std::time::Instant;

use gpush_api::{ApiError, Operation, OperationSummary};
use serde_json::{Value, json};

use super::{Agent, Answer, PATIENCE};

impl Agent {
    /// Requests layout entries on GPUs. Returns the new operation, or the error.
    pub fn begin(&self, gpus: &[&str], entries: &[&str]) -> Result<Operation, ApiError> {
        self.begin_with(&json!({ "selectors": gpus, "layout_source": { "entries": entries } }))
    }

    /// Sends the body as an apply request.
    ///
    /// # Errors
    /// The API error, if gpushd refuses the request.
    ///
    /// # Panics
    /// If the answer is neither an operation nor an API error.
    pub fn begin_with(&self, body: &Value) -> Result<Operation, ApiError> {
        let answer = self.post("/v1/mig/apply", body);
        if answer.status == 202 {
            return Ok(serde_json::from_value(answer.json()).expect("an operation"));
        }
        Err(answer.error())
    }

    /// Returns the current state of an operation.
    ///
    /// # Panics
    /// If no operation has that id.
    #[must_use]
    pub fn operation(&self, id: &str) -> Operation {
        serde_json::from_value(self.get(&format!("/v1/operations/{id}")).json()).expect("an operation")
    }

    /// Follows an operation until `is` returns true.
    ///
    /// # Panics
    /// If the operation ends first, or does not reach that state in time.
    #[must_use]
    pub fn follow_until(&self, mut operation: Operation, is: impl Fn(&Operation) -> bool) -> Operation {
        let until = Instant::now() + PATIENCE;
        while !is(&operation) {
            assert!(!operation.state.is_final() && Instant::now() < until, "{operation:?}\n{}", self.log());
            let path = format!("/v1/operations/{}?after={}&wait_ms=10000", operation.id, operation.revision);
            operation = serde_json::from_value(self.get(&path).json()).expect("an operation");
        }
        operation
    }

    /// Cancels an operation.
    #[must_use]
    pub fn cancel(&self, id: &str) -> Answer {
        self.request("POST", &format!("/v1/operations/{id}/cancel"), "", b"")
    }

    /// Follows an operation to its end.
    ///
    /// # Panics
    /// If the operation does not end in time.
    #[must_use]
    pub fn follow(&self, mut operation: Operation) -> Operation {
        let until = Instant::now() + PATIENCE * 2;
        while !operation.state.is_final() {
            assert!(Instant::now() < until, "{operation:?}\n{}", self.log());
            let path = format!("/v1/operations/{}?after={}&wait_ms=10000", operation.id, operation.revision);
            operation = serde_json::from_value(self.get(&path).json()).expect("an operation");
        }
        operation
    }

    /// Requests layout entries on GPUs, and follows the operation to its end.
    ///
    /// # Panics
    /// If gpushd refuses the request.
    #[must_use]
    pub fn apply(&self, gpus: &[&str], entries: &[&str]) -> Operation {
        match self.begin(gpus, entries) {
            Ok(operation) => self.follow(operation),
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Does the same as [`Agent::apply`], but creates no override.
    ///
    /// # Panics
    /// If gpushd refuses the request.
    #[must_use]
    pub fn apply_once(&self, gpus: &[&str], entries: &[&str]) -> Operation {
        match self.begin_with(&json!({ "selectors": gpus, "layout_source": { "entries": entries }, "once": true })) {
            Ok(operation) => self.follow(operation),
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Waits until no operation is running. Returns all operations of this gpushd, oldest first.
    ///
    /// # Panics
    /// If an operation does not end in time.
    #[must_use]
    pub fn settle(&self) -> Vec<Operation> {
        let all: Vec<OperationSummary> =
            serde_json::from_value(self.get("/v1/operations?limit=200").json()).expect("operations");
        let one = |id: &str| serde_json::from_value(self.get(&format!("/v1/operations/{id}")).json());
        let own = all.iter().filter(|one| one.created_at >= self.started);
        own.map(|operation| self.follow(one(&operation.id).expect("an operation"))).collect()
    }
}
