//! Records of overrides. An operation that succeeds can set, replace or end the override of a GPU.
//! Without such an operation, the override stays until it is cleared or expires. [`crate::state`]
//! contains the active overrides.
//!
//! | file | subject |
//! |---|---|
//! | `override_change` | the effect of a successful request |
//! | `effect` | changes in a transaction |
//! | `end` | expiry and clearing |

mod effect;
mod end;
mod override_change;

use gpush_api::{Gpu, GpuUuid};

pub(crate) use self::{
    effect::{check_generation, end, record_changes},
    end::{clear, expire},
    override_change::{OverrideChange, check_expiry_applies, override_changes},
};
use crate::{
    requests::caller::Viewer,
    state::{State, overridden, redact},
};

/// Returns all active overrides. Leaves out what `viewer` may not see. `gpus` are the GPUs that the
/// driver lists.
pub(crate) fn all(state: &State, gpus: &[Gpu], viewer: Viewer) -> Vec<gpush_api::Override> {
    let index = |uuid: &GpuUuid| gpus.iter().find(|gpu| gpu.uuid == *uuid).map(|gpu| gpu.index);
    let shown = |one: gpush_store::Override| {
        let gpu = index(&one.gpu_uuid);
        let mut shown = overridden(one, gpu);
        redact::actor(&mut shown.by, viewer);
        shown
    };
    state.overrides().into_iter().map(shown).collect()
}
