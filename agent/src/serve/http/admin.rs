//! Requests of administrators. A handler with an argument of the type [`Admin`] runs only for administrators.
//!
//! ```text
//! request ─► Admin<Action> ─┬─ administrator ───► handler
//!                           ├─ other caller ────► `denied`, recorded in the audit trail
//!                           └─ rank not known ──► `unavailable`
//! ```
//!
//! gpushd checks the caller before the body, so a caller who may not make the request learns nothing about its fields.

use std::marker::PhantomData;

use axum::{
    extract::{FromRef, FromRequestParts},
    http::request::Parts,
};
use gpush_api::Actor;

use super::failure::Failure;
use crate::{requests::caller::Caller, serve::authorization::Authorization};

/// An action that only administrators may take.
pub(super) trait AdminAction: Send {
    /// Completes the sentence "USER may not …", in the error and in the audit record of a refused attempt.
    const ATTEMPT: &'static str;
}

macro_rules! admin_actions {
    ($($name:ident: $attempt:literal),* $(,)?) => {
        $(#[derive(Debug)]
        pub(super) struct $name;

        impl AdminAction for $name {
            const ATTEMPT: &'static str = $attempt;
        })*
    };
}

admin_actions! {
    AcceptLoss: "accept a loss",
    ChangeDeviceAccess: "change the device access of login sessions",
    CancelOperations: "cancel operations",
    ChangeLayouts: "change MIG layouts",
    ControlMps: "start and stop MPS daemons",
    CordonGpus: "cordon GPUs",
    EndOverrides: "end overrides",
    EnterMaintenance: "put the host into maintenance",
    LeaveMaintenance: "take the host out of maintenance",
    PlanDeviceAccess: "plan a change of the device access",
    ReadAudit: "read the audit trail",
    ReadConfigFile: "read the config file",
    ReadMpsLogs: "read the logs of MPS daemons",
    ReloadConfig: "reload the config",
    RevokeLeases: "revoke leases",
    SetMpsLimits: "change MPS settings",
    UncordonGpus: "uncordon GPUs",
}

/// An administrator who takes the action `A`.
#[derive(Debug)]
pub(super) struct Admin<A> {
    pub(super) caller: Caller,
    /// The caller as it is stored in records.
    pub(super) by: Actor,
    action: PhantomData<A>,
}

impl<A: AdminAction, S: Send + Sync> FromRequestParts<S> for Admin<A>
where
    Authorization: FromRef<S>,
{
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let caller = Caller::from_request_parts(parts, state).await?;
        let by = Authorization::from_ref(state).admin(&caller, A::ATTEMPT).await?;
        Ok(Self { caller, by, action: PhantomData })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    /// The description of each endpoint says whether it is for administrators. Its handler must check that.
    #[test]
    fn admin_handlers_match_the_api_description() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/serve/http");
        let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let (mut admin, mut other) = (0, 0);
        for file in files.filter(|path| path.is_file()) {
            let source = std::fs::read_to_string(&file).unwrap();
            // A handler: its doc comment, the path in the description of the API, and its signature.
            for (at, _) in source.match_indices(concat!("#[cfg_attr(test, ", "utoipa::path(")) {
                let doc: String = source[..at].lines().rev().take_while(|line| line.starts_with("///")).collect();
                let signature = source[at..].split("async fn ").nth(1).unwrap().split(") -> ").next().unwrap();
                let is_described = doc.contains("For administrators");
                assert_eq!(is_described, signature.contains("Admin<"), "{}: {signature}", file.display());
                *(if is_described { &mut admin } else { &mut other }) += 1;
            }
        }
        assert!(admin >= 15 && other >= 15, "{admin} {other}");
    }
}
