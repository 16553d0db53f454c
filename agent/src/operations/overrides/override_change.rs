//! How an operation changes the override of a GPU. gpushd determines the change when it plans the
//! request, and applies it if the operation succeeds.

use gpush_api::{ApiError, Code, Gpu, GpuPlan, PlanRequest};
use gpush_core::{
    config::Config,
    desired::{self, OverrideEffect},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// How an operation changes the override of a GPU if it succeeds. The journal contains this change
/// until the operation ends.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OverrideChange {
    /// Sets this override.
    Make {
        /// The rule that claims the GPU.
        rule: Option<String>,
        /// The layout of the override, in canonical form.
        layout: Vec<String>,
        /// Time at which the override expires; `None` if it never does.
        expires_at: Option<Timestamp>,
    },
    /// Ends the override.
    End,
}

/// Returns how a request changes the override of each GPU, in the order of the plans.
pub(crate) fn override_changes(
    request: &PlanRequest,
    expires_at: Option<Timestamp>,
    config: &Config,
    gpus: &[Gpu],
    plans: &[GpuPlan],
) -> Vec<Option<OverrideChange>> {
    let lasting = |standing| match standing {
        OverrideEffect::Stays => None,
        OverrideEffect::Made { rule, layout } => Some(OverrideChange::Make { rule, layout, expires_at }),
        OverrideEffect::Ended => Some(OverrideChange::End),
    };
    desired::override_effects(config, gpus, request, plans).into_iter().map(lasting).collect()
}

/// Checks that a request with an expiry time sets an override.
///
/// # Errors
/// If the request has an expiry time but sets no override.
pub(crate) fn check_expiry_applies(
    expires_at: Option<Timestamp>,
    lasting: &[Option<OverrideChange>],
) -> Result<(), ApiError> {
    let makes = |one: &Option<OverrideChange>| matches!(one, Some(OverrideChange::Make { .. }));
    if expires_at.is_none() || lasting.iter().any(makes) {
        return Ok(());
    }
    Err(ApiError::new(Code::BadRequest, "an expiry has no effect: this request makes no override")
        .cause("a request makes an override only if the GPU's rule has mode `mig` and another layout than the request")
        .hint("repeat the command without an expiry, or change the rule of the GPU: `gpushctl config show` lists the rules"))
}
