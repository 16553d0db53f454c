//! Which instances a rollback destroys, creates and keeps.

use gpush_api::Gpu;

use super::*;
use crate::modes::scene::{mig_gpu, plan_layout, process, reading, whole_gpu};

const BEFORE: &[&str] = &["3g.40gb@4", "2g.20gb@0"];
const PLANNED: &[&str] = &["3g.40gb@4", "1g.10gb@0", "1g.10gb@1"];

type Planned = Result<(Vec<InstanceStep>, Option<PartialRestore>), ApiError>;

/// Plans the rollback of an operation from `before` to `PLANNED` that left the GPU as in `now`.
fn back_to(before: &Gpu, now: &Gpu, processes_known: bool, stays: Option<&[u32]>) -> Planned {
    let on = mig_gpu(BEFORE);
    let part = Part::new(0, plan_layout(&on, PLANNED), before.mig.clone(), &reading(&on));
    let reading = Reading { processes_known, ..reading(now) };
    let stays = stays.map(|ids| ids.iter().copied().collect());
    let (was, is) = (before.mig.as_ref().unwrap(), now.mig.as_ref().unwrap());
    plan_back(&part, was, is, &reading, &ProtectedInstances::default(), stays.as_ref())
}

fn back(now: &Gpu, processes_known: bool, stays: Option<&[u32]>) -> Planned {
    back_to(&mig_gpu(BEFORE), now, processes_known, stays)
}

fn destroyed(steps: &[InstanceStep]) -> BTreeSet<u32> {
    steps.iter().filter_map(InstanceStep::destroys).collect()
}

#[test]
fn new_instances_are_destroyed_and_previous_ones_created() {
    let (steps, partial) = back(&mig_gpu(PLANNED), true, None).unwrap();
    assert_eq!((destroyed(&steps), partial), ([0, 1].into(), None));
    assert!(
        steps
            .iter()
            .any(|step| matches!(step, InstanceStep::CreateGpuInstance { profile, .. } if profile == "2g.20gb"))
    );
    assert_eq!(back(&mig_gpu(BEFORE), true, None).unwrap(), (Vec::new(), None));
}

#[test]
fn all_instances_are_destroyed_if_mig_mode_was_off() {
    let (steps, partial) = back_to(&whole_gpu(), &mig_gpu(PLANNED), true, None).unwrap();
    assert_eq!((destroyed(&steps), partial), ([0, 1, 2].into(), None));
}

#[test]
fn instance_that_a_process_has_entered_stays() {
    let mut now = mig_gpu(PLANNED);
    now.mig.as_mut().unwrap().instances[0].compute[0].processes.push(process(7));
    let (steps, partial) = back(&now, true, None).unwrap();
    let partial = partial.unwrap();
    assert_eq!((partial.stays.len(), partial.stays[0].gi, partial.others.len()), (1, 0, 0));
    assert_eq!(partial.missing.iter().map(|one| one.what.as_str()).collect::<Vec<_>>(), ["2g.20gb@0"]);
    assert!(!destroyed(&steps).contains(&0), "{steps:?}");
}

#[test]
fn instance_of_another_program_stays() {
    let (steps, partial) = back(&mig_gpu(&["3g.40gb@4", "1g.10gb@0", "1g.10gb@3"]), true, None).unwrap();
    let partial = partial.unwrap();
    assert_eq!((destroyed(&steps), partial.others, partial.missing), ([0].into(), [1].into(), Vec::new()));
    let (steps, partial) = back(&mig_gpu(&["4g.40gb@0"]), true, None).unwrap();
    let partial = partial.unwrap();
    assert_eq!((destroyed(&steps), partial.others), (BTreeSet::new(), [0].into()));
    assert_eq!(partial.missing.iter().map(|one| one.what.as_str()).collect::<Vec<_>>(), ["2g.20gb@0"]);
}

/// The driver may list the processes again soon.
#[test]
fn first_attempts_fail_while_the_processes_are_unknown() {
    let error = back(&mig_gpu(PLANNED), false, None).unwrap_err();
    assert!(error.message.ends_with("so none of its instances is destroyed"), "{error:?}");
    // Nothing must be destroyed, so the processes do not matter.
    assert_eq!(back(&mig_gpu(BEFORE), false, None).unwrap(), (Vec::new(), None));
    let (steps, partial) = back(&mig_gpu(&["3g.40gb@4"]), false, None).unwrap();
    assert!(steps.len() == 2 && partial.is_none(), "{steps:?}");
}

#[test]
fn last_rollback_attempts_keep_what_cannot_be_destroyed() {
    let refused = back(&mig_gpu(PLANNED), true, Some(&[1])).unwrap();
    assert_eq!((destroyed(&refused.0), refused.1.unwrap().missing.len()), ([0].into(), 1));
    let unknown = back(&mig_gpu(PLANNED), false, Some(&[])).unwrap();
    assert_eq!((destroyed(&unknown.0), unknown.1.unwrap().stays.len()), (BTreeSet::new(), 2));
    // A GPU instance without compute instances has no processes.
    let mut now = mig_gpu(PLANNED);
    now.mig.as_mut().unwrap().instances.iter_mut().for_each(|instance| instance.compute.clear());
    let (steps, partial) = back(&now, false, Some(&[])).unwrap();
    assert!(destroyed(&steps).is_superset(&[0, 1].into()) && partial.is_none(), "{steps:?}");
}

/// Every user may read the error.
#[test]
fn error_of_a_partial_restore_names_no_process() {
    let (off, on) = (whole_gpu(), mig_gpu(BEFORE));
    let mut now = mig_gpu(PLANNED);
    now.mig.as_mut().unwrap().instances[0].compute[0].processes.push(process(4711));
    for (before, stays_on) in [(&on, false), (&off, true)] {
        let partial = back_to(before, &now, true, None).unwrap().1.unwrap();
        let part = Part::new(0, plan_layout(&on, PLANNED), before.mig.clone(), &reading(&on));
        let error = partly(&part, partial);
        let text = error.sentences().join("; ");
        assert!(!text.contains("4711") && !text.contains("alice"), "{text}");
        assert_eq!(text.contains("MIG mode stays on"), stays_on, "{text}");
    }
}
