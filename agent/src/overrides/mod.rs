//! Records of overrides. A successful operation sets an override, and it lasts until it is cleared
//! or expires. [`crate::state`] has the active overrides.
//!
//! | file | subject |
//! |---|---|
//! | `lasting` | the effect of a successful request |
//! | `effect` | changes in a transaction |
//! | `end` | expiry and clearing |

mod effect;
mod end;
mod lasting;

use gpush_api::Gpu;

pub(crate) use self::{
    effect::{end, expect, settle},
    end::{clear, expire},
    lasting::{Lasting, expiry_has_an_object, lasting},
};
use crate::{
    caller::Viewer,
    state::{State, overridden, redact},
};

/// Returns all active overrides, as `viewer` may see them. `gpus` are the listed GPUs.
pub(crate) fn all(state: &State, gpus: &[Gpu], viewer: Viewer) -> Vec<gpush_api::Override> {
    let index = |uuid: &str| gpus.iter().find(|gpu| gpu.uuid == uuid).map(|gpu| gpu.index);
    let shown = |one: gpush_store::Override| {
        let gpu = index(&one.gpu);
        let mut shown = overridden(one, gpu);
        redact::actor(&mut shown.by, viewer);
        shown
    };
    state.overrides().into_iter().map(shown).collect()
}
