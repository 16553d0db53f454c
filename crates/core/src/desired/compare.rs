//! Compares two configs by the desired state of each GPU.

use gpush_api::{DesiredView, Gpu, GpuDiff, GpuState, GpuUuid};

use super::{DesiredState, claims, desired_states};
use crate::{config::Config, layout::DYNAMIC};

/// Returns the desired state of each GPU, in order, without overrides.
fn desired_by_rule(config: &Config, gpus: &[Gpu]) -> Vec<DesiredView> {
    let view = |(desired_state, claimed): (DesiredState, Option<usize>)| {
        let rule = claimed.and_then(|position| config.rules.get(position));
        DesiredView {
            mode: desired_state.mode,
            rule: desired_state.rule,
            layout: match rule {
                Some(rule) if rule.is_dynamic() => Some(vec![DYNAMIC.to_owned()]),
                Some(_) | None => desired_state.configured.map(|layout| layout.canonical()),
            },
            mps: rule.and_then(|rule| rule.mps.clone()),
            timeslice: rule.and_then(|rule| rule.timeslice.clone()),
            lease: rule.and_then(|rule| rule.lease),
            access: rule.and_then(|rule| rule.access.clone()),
        }
    };
    desired_states(config, gpus).into_iter().zip(claims(config, gpus)).map(view).collect()
}

fn same(one: &DesiredView, other: &DesiredView) -> bool {
    // Compare only mode and layout: an override remains valid if only the rule's name or MPS settings change. An
    // override has no effect if the mode is `unmanaged` or there is no rule, so these two cases count as one mode.
    let mode = |view: &DesiredView| view.mode.is_managed().then_some(view.mode);
    (mode(one), &one.layout) == (mode(other), &other.layout)
}

/// Returns the GPUs of `uuids` whose desired state differs between the rules of `old` and `new`.
/// For a GPU that is not in `gpus`, the matching rule is unknown, so any difference between the
/// rules or layouts counts.
#[must_use]
pub fn changed_under(old: &Config, new: &Config, gpus: &[Gpu], uuids: &[GpuUuid]) -> Vec<GpuUuid> {
    let (before, after) = (desired_by_rule(old, gpus), desired_by_rule(new, gpus));
    let others = (&old.rules, &old.layouts) != (&new.rules, &new.layouts);
    let changed = |uuid: &&GpuUuid| match gpus.iter().position(|gpu| gpu.uuid == **uuid) {
        Some(at) => !same(&before[at], &after[at]),
        None => others,
    };
    uuids.iter().filter(changed).cloned().collect()
}

/// Returns the states of each GPU, in order: the desired state according to the config file, the
/// desired state according to the effective config, the override, and the actual instances.
#[must_use]
pub fn compare(in_force: &Config, in_file: Option<&Config>, gpus: &[Gpu]) -> Vec<GpuDiff> {
    let mut file = in_file.map(|config| desired_by_rule(config, gpus).into_iter());
    let diff =
        |(gpu, in_force): (&Gpu, DesiredView)| GpuDiff {
            gpu: gpu.index,
            gpu_uuid: gpu.uuid.clone(),
            in_file: file.as_mut().and_then(Iterator::next),
            in_force,
            overridden: gpu.overridden.clone(),
            stands: gpu.mig.as_ref().filter(|mig| mig.enabled).map(|mig| {
                mig.instances.iter().map(|one| format!("{}@{}", one.profile, one.placement.start)).collect()
            }),
            drift: gpu.drift.clone(),
            pending: gpu.pending.clone(),
            drift_known: !gpu.stale && !matches!(gpu.state, GpuState::Lost | GpuState::Unknown),
        };
    gpus.iter().zip(desired_by_rule(in_force, gpus)).map(diff).collect()
}
