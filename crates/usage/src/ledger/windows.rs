//! Builds the energy window of a GPU from a sample and the accounts of its holds.

use super::hold::HoldAccount;
use crate::{
    energy::{EndedInWindow, EnergyWindow, HeldInWindow, InstanceActivity, OtherProcesses},
    input::{Activity, GpuProcess, Ratio, Reading, WindowScope},
    judge::Signals,
};

/// Returns the energy window that ends with a sample. `difference` is the energy in mJ and the time in ms.
pub(super) fn energy_window(
    signals: &Signals<'_>,
    accounts: &[HoldAccount],
    ended: Vec<EndedInWindow>,
    difference: (u64, u64),
    least_mw: u64,
) -> EnergyWindow {
    let holds = accounts.iter().map(|account| {
        let own: Vec<&GpuProcess> = signals.own(account.lease, &account.hold).collect();
        HeldInWindow {
            unit_ms: account.window_unit_ms,
            held_ms: account.window_ms,
            instance: account.hold.instance,
            is_whole: account.hold.kind == gpush_api::LeaseKind::Whole,
            has_process: !own.is_empty(),
            process_use: process_use(own),
        }
    });
    let others = signals
        .without_holder()
        .map(|process| OtherProcesses { instance: process.instance, process_use: process_use([process]) });
    EnergyWindow {
        energy_mj: difference.0,
        length_ms: difference.1,
        least_mw,
        holds: holds.collect(),
        ended,
        others: others.collect(),
        instances: instances(signals),
    }
}

fn process_use<'a>(processes: impl IntoIterator<Item = &'a GpuProcess>) -> Option<u64> {
    processes.into_iter().map(|process| process.sm.value().map(|sm| u64::from(sm.millionths()))).sum()
}

/// Returns the activities of all GPU instances; `None` without MIG, or if one activity is not known.
fn instances(signals: &Signals<'_>) -> Option<Vec<InstanceActivity>> {
    let mut instances = Vec::new();
    for window in signals.windows() {
        let WindowScope::Instance(instance) = window.scope else { continue };
        let activity = match window.activity {
            Reading::Value(activity) => best(activity)?,
            // A GPU instance without a compute instance has no activity.
            Reading::Unsupported => 0,
            Reading::Failed => return None,
        };
        instances.push(InstanceActivity { instance, units: window.units, activity });
    }
    (!instances.is_empty()).then_some(instances)
}

/// Returns the activity that says most about energy: that of the SMs, or else of the engines.
fn best(activity: Activity) -> Option<u32> {
    activity.sm.or(activity.graphics).map(Ratio::millionths)
}
