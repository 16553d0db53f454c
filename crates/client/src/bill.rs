//! Calls for bills.

use gpush_api::{Bill, BillModel, UsageGrouping};
use hyper::body::Bytes;

use crate::{client::Client, error::Error, path_segment::segment, question::Question};

/// Selects a bill.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BillSelection {
    /// Month in UTC, such as `2026-11`; `None` for the present one.
    pub month: Option<String>,
    /// What the bill charges for.
    pub model: BillModel,
    /// Only leases of this user.
    pub user: Option<String>,
}

impl BillSelection {
    fn parameters(&self) -> String {
        let mut parameters = format!("model={}", self.model.name());
        for (name, value) in [("month", &self.month), ("user", &self.user)] {
            if let Some(value) = value {
                parameters += &format!("&{name}={}", segment(value));
            }
        }
        parameters
    }
}

impl Client {
    /// `GET /v1/bill`. Returns the sums of the bill of a month.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::Denied`] for another user, unless the caller is an administrator.
    pub async fn bill(&mut self, selection: &BillSelection, by: UsageGrouping) -> Result<Bill, Error> {
        self.get(&format!("/v1/bill?{}&by={}", selection.parameters(), by.name())).await
    }

    /// `GET /v1/bill/csv`. Returns the rows of the bill of a month. With `focus`, they have the columns of FOCUS 1.2.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::Denied`] for another user, unless the caller is an administrator.
    pub async fn bill_rows(&mut self, selection: &BillSelection, focus: bool) -> Result<Bytes, Error> {
        let path = format!("/v1/bill/csv?{}&focus={focus}", selection.parameters());
        Ok(self.get_text(&Question::get(&path)).await?.1)
    }
}
