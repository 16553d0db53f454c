//! Calls for what GPUs and leases are used for.

use gpush_api::{HostUsage, LeaseId, LeasePast, UsageGrouping, UsageHistory, UsageReport};
use jiff::Timestamp;

use crate::{client::Client, error::Error, path_segment::segment};

impl Client {
    /// `GET /v1/usage`. Does not start samples: a figure is as old as the last sample.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn usage(&mut self) -> Result<HostUsage, Error> {
        self.get("/v1/usage").await
    }

    /// `GET /v1/usage?watch=true`. While a client repeats the request, gpushd samples the GPUs each second. So the first
    /// answer has few figures.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub async fn watched_usage(&mut self) -> Result<HostUsage, Error> {
        self.get("/v1/usage?watch=true").await
    }

    /// `GET /v1/usage/report`. Returns who used how much from a time, by default in the last 24 hours, until now or the end
    /// of the period. `user` limits the report to one user.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::Denied`] for another user, unless the caller is an administrator.
    pub async fn usage_report(
        &mut self,
        (since, until): (Option<Timestamp>, Option<Timestamp>),
        by: UsageGrouping,
        user: Option<&str>,
    ) -> Result<UsageReport, Error> {
        let mut path = format!("/v1/usage/report?by={}", by.name());
        for (name, time) in [("since", since), ("until", until)] {
            if let Some(time) = time {
                path += &format!("&{name}={time}");
            }
        }
        if let Some(user) = user {
            path += &format!("&user={}", segment(user));
        }
        self.get(&path).await
    }

    /// `GET /v1/usage/history`. Returns what each lease was used for since a time, by default in the last 7 days. `user`
    /// limits the answer to the leases of one user.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::Denied`] for another user, unless the caller is an administrator.
    pub async fn usage_history(&mut self, since: Option<Timestamp>, user: Option<&str>) -> Result<UsageHistory, Error> {
        let since = since.map(|since| format!("since={since}"));
        let user = user.map(|user| format!("user={}", segment(user)));
        let parameters: Vec<String> = since.into_iter().chain(user).collect();
        self.get(&format!("/v1/usage/history?{}", parameters.join("&"))).await
    }

    /// `GET /v1/leases/{id}/usage`. Returns the recent past of a lease that has not ended.
    ///
    /// # Errors
    /// See [`crate::Kind`]; [`gpush_api::Code::NotFound`] if the caller may not see the use of the lease.
    pub async fn lease_past(&mut self, id: LeaseId) -> Result<LeasePast, Error> {
        self.get(&format!("/v1/leases/{id}/usage")).await
    }
}
