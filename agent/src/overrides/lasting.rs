//! The effect of a request on overrides: announced when it is made, and applied when its operation succeeds.

use gpush_api::{ApiError, Code, Gpu, GpuPlan, PlanRequest};
use gpush_core::{
    config::Config,
    desired::{self, Standing},
};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The effect of a successful operation on a GPU's override. Until then it is part of its intent.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Lasting {
    /// This override is set.
    Make {
        /// Rule that claims the GPU.
        rule: Option<String>,
        /// Layout in canonical text.
        layout: Vec<String>,
        /// When it expires.
        expires_at: Option<Timestamp>,
    },
    /// The override ends.
    End,
}

/// Returns the effect of a request on the override of each GPU, in the order of its plans.
pub(crate) fn lasting(
    request: &PlanRequest,
    expires_at: Option<Timestamp>,
    config: &Config,
    gpus: &[Gpu],
    plans: &[GpuPlan],
) -> Vec<Option<Lasting>> {
    let lasting = |standing| match standing {
        Standing::Stays => None,
        Standing::Made { rule, layout } => Some(Lasting::Make { rule, layout, expires_at }),
        Standing::Ended => Some(Lasting::End),
    };
    desired::standing(config, gpus, request, plans).into_iter().map(lasting).collect()
}

/// Refuses an expiry for a request that sets no override.
///
/// # Errors
/// If the request has an expiry and sets no override.
pub(crate) fn expiry_has_an_object(expires_at: Option<Timestamp>, lasting: &[Option<Lasting>]) -> Result<(), ApiError> {
    let makes = |one: &Option<Lasting>| matches!(one, Some(Lasting::Make { .. }));
    if expires_at.is_none() || lasting.iter().any(makes) {
        return Ok(());
    }
    Err(ApiError::new(Code::BadRequest, "an expiry has no effect: this request makes no override")
        .cause("an override is an explicit layout, other than its rule's, on a GPU whose rule has mode `mig`")
        .hint("leave out the expiry; `gpushctl config show` shows which rule claims which GPU"))
}
