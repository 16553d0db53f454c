//! The effect of a request on overrides. gpushd determines the effect when it plans the request,
//! and applies it if the operation succeeds.

use gpush_api::{ApiError, Code, Gpu, GpuPlan, PlanRequest};
use gpush_core::{
    config::Config,
    desired::{self, OverrideEffect},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The effect of a successful operation on a GPU's override. Until the operation ends, the effect
/// is part of the operation's intent.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OverrideChange {
    /// Sets this override.
    Make {
        /// The rule that claims the GPU.
        rule: Option<String>,
        /// The layout as canonical text.
        layout: Vec<String>,
        /// When the override expires.
        expires_at: Option<Timestamp>,
    },
    /// Ends the override.
    End,
}

/// Returns the effect of a request on the override of each GPU, in the order of the request's
/// plans.
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

/// Refuses an expiry time if the request sets no override.
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
