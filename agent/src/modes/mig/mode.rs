//! Steps that change MIG mode. gpushd changes all GPUs of an operation together, because some GPUs can only be reset
//! together.

use std::collections::BTreeMap;

use gpush_api::{ApiError, Code};
use gpush_core::step::{self, Verdict};

use super::{
    MigMode,
    mode_change::{Completion, ModeChange},
    preflight::NotReset,
    reset::Purpose,
};
use crate::modes::{
    GpuName, Trouble,
    driver::{Driver, explain, no_effect, without_effect},
};

/// The result of a call that sets MIG mode.
#[derive(Debug)]
enum SetModeResult {
    /// The mode is effective.
    InForce,
    /// The mode becomes effective with the next reset or reboot. If the mode must be effective at once, the step has
    /// failed for this reason.
    Pending(Trouble),
}

/// Sets MIG mode on several GPUs. Resets the GPUs that need a reset, but only if all GPUs accepted the mode. Returns
/// the failures; the key is the position of the GPU.
pub(crate) async fn execute(
    mig: &MigMode,
    purpose: &Purpose<'_>,
    changes: &[ModeChange],
    enable: bool,
) -> BTreeMap<usize, Trouble> {
    let mut troubled = BTreeMap::new();
    let mut due = Vec::new();
    for change in changes {
        match set(&mig.driver, &change.gpu, enable).await {
            Ok(SetModeResult::InForce) => {}
            Ok(SetModeResult::Pending(trouble)) => match change.completion {
                Completion::Driver => {
                    troubled.insert(change.position, trouble);
                }
                Completion::Reset => due.push(change),
                Completion::Reboot => {}
            },
            Err(trouble) => {
                troubled.insert(change.position, trouble);
            }
        }
    }
    if !troubled.is_empty() || due.is_empty() {
        return troubled;
    }
    let outcome = mig.reset(purpose, &due).await;
    for change in due {
        if let Err(trouble) = verify_effective(mig, change, enable, &outcome).await {
            troubled.insert(change.position, trouble);
        }
    }
    troubled
}

/// Checks that a mode is effective, after gpushd has reset the GPU or tried to.
async fn verify_effective(
    mig: &MigMode,
    change: &ModeChange,
    enable: bool,
    outcome: &Result<(), NotReset>,
) -> Result<(), Trouble> {
    let explained = |error: ApiError| {
        let message = format!("{}: {} failed", change.gpu.label, step::describe_mode(enable));
        error.context(message)
    };
    let reading = mig.driver.read(&change.gpu).await?;
    match (step::verify_mode(enable, reading.mig.as_ref()), outcome) {
        (Verdict::Done, _) => Ok(()),
        (Verdict::NotDone | Verdict::MayTakeEffect, Err(NotReset::Cancelled(why))) => Err(Trouble::Failed(why.clone())),
        (Verdict::NotDone | Verdict::MayTakeEffect, Err(NotReset::InUse(why))) => {
            Err(Trouble::InUse(explained(why.clone())))
        }
        (Verdict::NotDone | Verdict::MayTakeEffect, Err(NotReset::Failed(error))) => {
            Err(Trouble::Failed(explained(error.clone())))
        }
        (Verdict::NotDone | Verdict::MayTakeEffect, Ok(())) => {
            let error = ApiError::new(Code::DriverError, "the GPU was reset, but MIG mode did not change")
                .hint("look for the cause in the kernel's log: `dmesg | grep -i -e nvrm -e xid`");
            Err(Trouble::Failed(explained(error)))
        }
    }
}

/// Sets the MIG mode of a GPU without a reset. So the mode may stay pending until the next reset.
///
/// # Errors
/// If the driver refuses the mode, the GPU is lost, or the call may still take effect.
pub(crate) async fn set_pending(driver: &Driver, gpu: &GpuName, enable: bool) -> Result<(), Trouble> {
    set(driver, gpu, enable).await.map(|_| ())
}

async fn set(driver: &Driver, gpu: &GpuName, enable: bool) -> Result<SetModeResult, Trouble> {
    let what = format!("{}: {} failed", gpu.label, step::describe_mode(enable));
    let called = driver.hardware.set_mig_mode(&gpu.uuid, enable).await;
    driver.readings.invalidate(&gpu.uuid);
    match called {
        Ok(change) if change.is(enable) => Ok(SetModeResult::InForce),
        Ok(change) => {
            let mut error = match &change.activation {
                Some(error) => explain(&what, error),
                None => ApiError::new(Code::DriverError, what),
            };
            if change.pending != change.enabled {
                error = error.cause("the driver accepted the change, but it takes effect only with a GPU reset");
            }
            let trouble = match &change.activation {
                Some(activation) => no_effect(activation, error),
                None => Trouble::Failed(error),
            };
            if change.pending == enable { Ok(SetModeResult::Pending(trouble)) } else { Err(trouble) }
        }
        Err(error) => {
            let reading = driver.after_failed_call(gpu, &what, &error).await?;
            let trouble = no_effect(&error, without_effect(&what, &error));
            match step::verify_mode(enable, reading.mig.as_ref()) {
                Verdict::Done => Ok(SetModeResult::InForce),
                Verdict::MayTakeEffect => Ok(SetModeResult::Pending(trouble)),
                Verdict::NotDone => Err(trouble),
            }
        }
    }
}
