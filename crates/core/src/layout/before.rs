//! The layout of a GPU before an operation, from the operation's record.

use gpush_api::{ComputeInstance, GpuLayout, GpuPlan, Mig};

use super::{Layout, NONE, Share, edit};

/// Returns MIG mode and layout before an operation. `mig` is what gpushd read before the operation, `plan` is what the
/// operation did. All entries have a start, so a plan of this layout restores the same placements.
pub fn layout_before(plan: &GpuPlan, mig: &Mig) -> GpuLayout {
    let gpu = plan.gpu_uuid.to_string();
    if !mig.enabled {
        return GpuLayout { gpu, mig: false, layout: Vec::new() };
    }
    let after = Layout::parse_list(&plan.layout).unwrap_or_default();
    let was_shared = |profile: &str, start: u8, compute: &ComputeInstance| {
        // The operation stopped the daemon of the device, or the device stayed and still has a daemon.
        let is_stopped = plan.stopped_daemons().any(|uuid| compute.uuid.as_ref() == Some(uuid));
        let name = format!("{profile}@{start}");
        let is_started = plan.started_daemons().any(|device| device == Some(name.as_str()));
        let is_shared_after = after.entries.iter().any(|entry| {
            entry.share == Some(Share::Mps)
                && entry.profile == profile
                && entry.start.is_none_or(|written| written == start)
        });
        is_stopped || is_shared_after && !is_started
    };
    let mut entries = Vec::new();
    for instance in &mig.instances {
        let is_kept = plan.keeps.contains(&instance.id);
        let shared = |compute: &ComputeInstance| {
            (is_kept || plan.stopped_daemons().next().is_some())
                && was_shared(&instance.profile, instance.placement.start, compute)
        };
        entries.extend(edit::entries(instance, shared));
    }
    let layout = Layout { entries }.canonical();
    GpuLayout { gpu, mig: true, layout: layout.into_iter().filter(|entry| entry != NONE).collect() }
}

/// Returns whether a layout from a record is the layout of the rule. If the rule has no starts, the instances may be
/// anywhere.
#[must_use]
pub fn equals_rule_layout(recorded: &[String], rule: &[String]) -> bool {
    let (Ok(mut recorded), Ok(rule)) = (Layout::parse_list(recorded), Layout::parse_list(rule)) else { return false };
    if rule.entries.iter().all(|entry| entry.start.is_none()) {
        recorded.entries.iter_mut().for_each(|entry| entry.start = None);
    }
    recorded.counts() == rule.counts()
}

#[cfg(test)]
mod tests {
    use gpush_api::{GpuInstance, Placement, Step, step::MpsStep};

    use super::*;

    fn instance(id: u32, profile: &str, start: u8, uuid: &str) -> GpuInstance {
        GpuInstance {
            id,
            profile_id: 0,
            profile: profile.to_owned(),
            placement: Placement { start, size: 1 },
            memory: None,
            compute: vec![ComputeInstance {
                id: 0,
                profile_id: 0,
                profile: profile.to_owned(),
                placement: None,
                uuid: Some(uuid.into()),
                processes: Vec::new(),
            }],
            processes: Vec::new(),
        }
    }

    fn mig(instances: Vec<GpuInstance>) -> Mig {
        let mut mig = crate::preset::gpus("dgx-a100").unwrap().remove(0).mig.unwrap();
        mig.enabled = true;
        mig.instances = instances;
        mig
    }

    #[test]
    fn entries_have_the_starts_of_the_instances() {
        let before = mig(vec![instance(1, "3g.40gb", 0, "MIG-a"), instance(2, "1g.10gb", 4, "MIG-b")]);
        let plan = GpuPlan { gpu_uuid: "GPU-0".into(), layout: vec!["7g.80gb".to_owned()], ..GpuPlan::default() };
        let expected = GpuLayout {
            gpu: "GPU-0".to_owned(),
            mig: true,
            layout: vec!["3g.40gb@0".to_owned(), "1g.10gb@4".to_owned()],
        };
        assert_eq!(layout_before(&plan, &before), expected);
    }

    #[test]
    fn gpu_without_mig_or_instances_has_no_entries() {
        let plan = GpuPlan::default();
        assert_eq!(layout_before(&plan, &mig(Vec::new())).layout, [] as [&str; 0]);
        let off = layout_before(&plan, &Mig { enabled: false, ..mig(vec![instance(1, "3g.40gb", 0, "MIG-a")]) });
        assert_eq!((off.mig, off.layout.len()), (false, 0));
    }

    #[test]
    fn recorded_layout_equals_rule_layout_without_starts() {
        let is = |recorded: &[&str], rule: &[&str]| {
            let texts = |all: &[&str]| all.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
            equals_rule_layout(&texts(recorded), &texts(rule))
        };
        assert!(is(&["3g.40gb@4", "3g.40gb@0"], &["3g.40gb*2"]));
        assert!(!is(&["3g.40gb@0"], &["3g.40gb*2"]));
        assert!(!is(&["3g.40gb@0"], &["3g.40gb@4"]) && is(&["3g.40gb@4"], &["3g.40gb@4"]));
        assert!(!is(&["3g.40gb@0:mps"], &["3g.40gb"]) && !is(&["3g.40gb@0"], &["dynamic"]));
    }

    #[test]
    fn device_whose_daemon_was_stopped_was_shared() {
        let before = mig(vec![instance(1, "2g.20gb", 0, "MIG-a"), instance(2, "2g.20gb", 2, "MIG-b")]);
        let stop = Step::Mps(MpsStep::StopDaemon { uuid: "MIG-b".into(), label: "device".to_owned() });
        let plan = GpuPlan { steps: vec![stop], layout: vec!["7g.80gb".to_owned()], ..GpuPlan::default() };
        assert_eq!(layout_before(&plan, &before).layout, ["2g.20gb@0", "2g.20gb@2:mps"]);
    }

    #[test]
    fn kept_device_was_shared_unless_the_operation_started_its_daemon() {
        let before = mig(vec![instance(1, "2g.20gb", 0, "MIG-a")]);
        let kept = GpuPlan { keeps: vec![1], layout: vec!["2g.20gb@0:mps".to_owned()], ..GpuPlan::default() };
        assert_eq!(layout_before(&kept, &before).layout, ["2g.20gb@0:mps"]);
        let start = Step::Mps(MpsStep::StartDaemon { device: Some("2g.20gb@0".to_owned()) });
        let started = GpuPlan { steps: vec![start], ..kept };
        assert_eq!(layout_before(&started, &before).layout, ["2g.20gb@0"]);
    }
}
