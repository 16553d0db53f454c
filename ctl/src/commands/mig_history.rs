//! `gpushctl explain MIG-…`: where a MIG device is, or what happened to it.
//!
//! The answer is composed of what gpushd keeps: the MIG devices, the last operations with their plans, and the last
//! leases. A user sees only what these lists show to this user.

use std::collections::BTreeSet;

use gpush_api::{
    ApiError, Code, GpuPlan, InstanceStep, Lease, LeaseState, MigDevice, Operation, OperationState, TargetUuid,
};
use gpush_client::{Client, Error};
use gpush_core::nearest::nearest;

use crate::{
    exit::{Failure, Outcome},
    output::Output,
    render::{
        mig_history::{self, Destroyed, History, UsedBy},
        names::user_name,
    },
};

/// Number of operations and of ended leases that are searched. gpushd keeps at most 1000 of each.
const OPERATIONS: usize = 200;
const LEASES: usize = 1000;

/// Exit status 0 if the device exists, otherwise 2.
pub(super) async fn run(client: &mut Client, uuid: &str, out: &Output) -> Outcome {
    let devices = client.mig_devices().await?;
    let operations = operations(client).await?;
    let leases = client.leases(LEASES).await?;
    let uuid = complete(uuid, &known_uuids(&devices, &operations, &leases))?;
    let history = History::of(&uuid, &devices, &operations, &leases);
    out.show(&history, |look| mig_history::text(&history, OPERATIONS, LEASES, look))?;
    Ok(if history.device.is_some() { 0 } else { Code::NotFound.exit_status() })
}

/// Returns the last operations, the last one first.
async fn operations(client: &mut Client) -> Result<Vec<Operation>, Failure> {
    let mut operations = Vec::new();
    for one in client.last_operations(OPERATIONS, None).await? {
        operations.extend(if_kept(client.operation(&one.id).await)?);
    }
    operations.sort_by_key(|one| std::cmp::Reverse(one.created_at));
    Ok(operations)
}

/// Returns the operation of an answer; `None` if gpushd has removed the operation since it listed it.
fn if_kept(answer: Result<Operation, Error>) -> Result<Option<Operation>, Error> {
    match answer {
        Err(error) if error.code() == Code::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Returns the UUIDs of all MIG devices that exist, that an operation has destroyed, or that had a lease.
fn known_uuids<'a>(devices: &'a [MigDevice], operations: &'a [Operation], leases: &'a [Lease]) -> BTreeSet<&'a str> {
    let present = devices.iter().filter_map(|one| one.uuid.as_ref().map(TargetUuid::as_str));
    let steps = operations.iter().flat_map(|one| &one.plans).flat_map(GpuPlan::instance_steps);
    let destroyed = steps.filter_map(|step| match step {
        InstanceStep::DestroyCompute { uuid, .. } => uuid.as_ref().map(TargetUuid::as_str),
        _ => None,
    });
    let targets = leases.iter().flat_map(|one| &one.members).map(|member| member.target.as_str());
    present.chain(destroyed).chain(targets.filter(|target| target.starts_with("MIG-"))).collect()
}

/// Returns the UUID that a user has typed, in full: the only known UUID that begins with the text.
///
/// # Errors
/// If several known UUIDs begin with the text, or if the text is not a UUID and no known UUID begins with it.
fn complete(text: &str, known: &BTreeSet<&str>) -> Result<String, ApiError> {
    let begins = |uuid: &&&str| uuid.get(..text.len()).is_some_and(|start| start.eq_ignore_ascii_case(text));
    let found: Vec<&str> = known.iter().filter(begins).copied().collect();
    match found.as_slice() {
        [one] => Ok((*one).to_owned()),
        [] if is_uuid(text) => Ok(text.to_owned()),
        [] => {
            let hint = match nearest(text, known.iter().copied()) {
                Some(one) => format!("did you mean {one}? `gpushctl mig list -o uuid` lists the UUIDs"),
                None => "`gpushctl mig list -o uuid` lists the UUIDs".to_owned(),
            };
            let message = format!("{text} is not the UUID of a MIG device, and no known UUID begins with it");
            Err(ApiError::new(Code::NotFound, message).hint(hint))
        }
        [first, second, ..] => {
            let others = if found.len() == 2 { String::new() } else { format!(" and {} more", found.len() - 2) };
            Err(ApiError::new(Code::BadRequest, format!("several MIG devices have a UUID that begins with {text}"))
                .cause(format!("{first}, {second}{others}"))
                .hint("write more of the UUID: `gpushctl mig list -o uuid` lists the UUIDs"))
        }
    }
}

/// Returns whether the text has the form of a complete UUID of a MIG device: `MIG-<uuid>`, or `MIG-GPU-<uuid>/<GPU
/// instance>/<compute instance>` with drivers before R470.
fn is_uuid(text: &str) -> bool {
    let is_hex = |part: &str, length: usize| part.len() == length && part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_plain = |text: &str| {
        let parts: Vec<&str> = text.split('-').collect();
        parts.len() == 5 && parts.iter().zip([8, 4, 4, 4, 12]).all(|(part, length)| is_hex(part, length))
    };
    let Some(rest) = text.get(4..) else { return false };
    match rest.strip_prefix("GPU-").map(|old| old.split('/').collect::<Vec<_>>()).as_deref() {
        Some([uuid, gi, ci]) => is_plain(uuid) && gi.parse::<u32>().is_ok() && ci.parse::<u32>().is_ok(),
        Some(_) => false,
        None => is_plain(rest),
    }
}

/// Returns the name of a device in commands.
fn name(device: &MigDevice) -> String {
    format!("{}:{}", device.gpu, device.device.as_deref().unwrap_or(&device.instance))
}

/// Returns the name that a destroyed device had in commands. If its GPU instance was not destroyed too, the plan does
/// not contain the placement.
fn place(plan: &GpuPlan, gi: u32, profile: &str) -> String {
    let start = plan.instance_steps().find_map(|step| match step {
        InstanceStep::DestroyGpuInstance { gi: other, placement, .. } if *other == gi => Some(placement.start),
        _ => None,
    });
    match start {
        Some(start) => format!("{}:{profile}@{start}", plan.gpu),
        None => format!("{}:{profile}", plan.gpu),
    }
}

impl History {
    fn of(uuid: &str, devices: &[MigDevice], operations: &[Operation], leases: &[Lease]) -> Self {
        let same = |other: &str| other.eq_ignore_ascii_case(uuid);
        let device = devices.iter().find(|one| one.uuid.as_ref().map(TargetUuid::as_str).is_some_and(same)).map(name);
        let mut destroyed = Vec::new();
        let may_have_destroyed = |one: &&Operation| match one.state {
            OperationState::Done => true,
            // The step that destroys the device may not have been executed.
            OperationState::Failed => device.is_none(),
            // An operation that was rolled back has created the device again.
            _ => false,
        };
        for operation in operations.iter().filter(may_have_destroyed) {
            for plan in &operation.plans {
                let found = plan.instance_steps().find_map(|step| match step {
                    InstanceStep::DestroyCompute { gi, profile, uuid: Some(other), .. } if same(other.as_str()) => {
                        Some((*gi, profile))
                    }
                    _ => None,
                });
                let Some((gi, profile)) = found else { continue };
                destroyed.push(Destroyed {
                    operation_id: operation.id.clone(),
                    kind: operation.kind.clone(),
                    operation_state: operation.state,
                    user: user_name(operation.by.user.as_deref(), operation.by.uid, None),
                    at: operation.ended_at.unwrap_or(operation.created_at),
                    gpu: plan.gpu,
                    place: place(plan, gi, profile),
                    present_devices: devices
                        .iter()
                        .filter(|one| one.gpu_uuid == plan.gpu_uuid && one.device.is_some())
                        .map(name)
                        .collect(),
                });
            }
        }
        let mut used: Vec<UsedBy> = leases
            .iter()
            .filter(|lease| lease.members.iter().any(|member| same(member.target.as_str())))
            .map(|lease| UsedBy {
                lease_id: lease.id.to_string(),
                user: user_name(lease.holder.user.as_deref(), lease.holder.uid, lease.account.as_deref()),
                from: lease.granted_at,
                until: lease.ended_at.filter(|_| lease.state == LeaseState::Ended),
            })
            .collect();
        used.sort_by_key(|one| std::cmp::Reverse(one.from));
        Self { uuid: uuid.to_owned(), device, destroyed_by: destroyed, used_by: used }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use gpush_api::{ApiError, Placement, Step};
    use gpush_client::Kind;

    use super::*;
    use crate::render::{Charset, fixtures};

    const UUID: &str = "MIG-5d1b03a2-0000-4000-8000-00000000000b";

    /// An operation that has destroyed the device [`UUID`], with the place of the device.
    fn operation(state: OperationState) -> (Operation, String) {
        let mut operation = fixtures::operation(state);
        let step = |uuid: &str| {
            let (profile, uuid) = ("3g.40gb".to_owned(), Some(uuid.into()));
            Step::Instance(InstanceStep::DestroyCompute { gi: 1, ci: 0, profile, uuid })
        };
        let plan = operation.plans.first_mut().unwrap();
        let placement = Placement { start: 4, size: 4 };
        let instance = InstanceStep::DestroyGpuInstance { gi: 1, profile: "3g.40gb".to_owned(), placement };
        plan.steps = vec![step("MIG-other"), step(UUID), Step::Instance(instance)];
        let place = format!("{}:3g.40gb@4", plan.gpu);
        (operation, place)
    }

    /// The history of a destroyed device.
    pub(in crate::commands) fn destroyed() -> History {
        History::of(UUID, &[], &[operation(OperationState::Done).0], &[])
    }

    fn text(history: &History) -> String {
        mig_history::text(history, OPERATIONS, LEASES, &fixtures::look(100, Charset::Ascii))
    }

    /// A device with this UUID at the place `3g.40gb@4` of the GPU of [`operation`].
    fn device(uuid: &str, plan: &GpuPlan) -> MigDevice {
        serde_json::from_value(serde_json::json!({
            "gpu": plan.gpu,
            "gpu_uuid": plan.gpu_uuid,
            "instance": "3g.40gb@4",
            "device": "3g.40gb@4",
            "profile": "3g.40gb",
            "gi": 1,
            "uuid": uuid,
            "use": "free",
            "available": true,
        }))
        .unwrap()
    }

    /// Fault: a UUID with a missing or wrong character was reported as a device that a reboot had removed.
    #[test]
    fn uuid_may_be_shortened_but_not_mistyped() {
        let (operation, _) = operation(OperationState::Done);
        let present = device("MIG-5d1b77aa-0000-4000-8000-00000000000c", &operation.plans[0]);
        let (devices, operations) = ([present], [operation]);
        let known = known_uuids(&devices, &operations, &[]);
        assert_eq!(known.len(), 3, "one device exists, two were destroyed: {known:?}");
        assert_eq!(complete("MIG-5D1B03", &known).unwrap(), UUID);
        assert_eq!(complete(UUID, &known).unwrap(), UUID);
        let several = complete("MIG-5d1b", &known).unwrap_err();
        assert!(several.code == Code::BadRequest && several.causes[0].contains(UUID), "{several:?}");
        let mistyped = complete(&UUID.replace("03a2", "0a2"), &known).unwrap_err();
        assert!(mistyped.code == Code::NotFound && mistyped.hint.unwrap().contains(UUID));
        // A complete UUID that gpushd does not know may belong to a device from before a reboot.
        for unknown in ["MIG-00000000-0000-4000-8000-000000000000", "MIG-GPU-00000000-0000-4000-8000-000000000000/1/0"]
        {
            assert_eq!(complete(unknown, &known).unwrap(), unknown);
        }
        assert_eq!(complete("MIG-GPU-0/1/0", &known).unwrap_err().code, Code::NotFound);
    }

    /// Fault: no command explained what had happened to a destroyed device.
    #[test]
    fn destroyed_device_names_its_operation_and_its_place() {
        let (operation, place) = operation(OperationState::Done);
        let history = History::of(&UUID.to_uppercase(), &[], std::slice::from_ref(&operation), &[]);
        let text = text(&history);
        assert!(history.device.is_none() && history.destroyed_by.len() == 1, "{history:?}");
        for part in ["does not exist now", &operation.id, &format!("it was {place}"), "`gpushctl mig list`"] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }

    /// Fault: the hint named a place at which the GPU had no device, so the command in the hint failed.
    #[test]
    fn hint_names_a_place_only_if_a_device_has_this_place() {
        let (operation, place) = operation(OperationState::Done);
        let gone = History::of(UUID, &[], std::slice::from_ref(&operation), &[]);
        assert!(!text(&gone).contains("--target"), "{}", text(&gone));
        assert!(!text(&History::of(UUID, &[], &[], &[])).contains("--target"));
        let next = device("MIG-next", &operation.plans[0]);
        let recreated = History::of(UUID, std::slice::from_ref(&next), std::slice::from_ref(&operation), &[]);
        assert!(text(&recreated).contains(&format!("--target {place} --")), "{}", text(&recreated));
        let without_compute = MigDevice { device: None, uuid: None, ..next };
        let history = History::of(UUID, &[without_compute], &[operation], &[]);
        assert!(!text(&history).contains("--target"), "{}", text(&history));
    }

    #[test]
    fn operation_that_was_rolled_back_has_destroyed_nothing() {
        let (operation, _) = operation(OperationState::RolledBack);
        assert!(History::of(UUID, &[], &[operation], &[]).destroyed_by.is_empty());
    }

    /// Fault: a failed operation counted as the one that had destroyed a device that still existed.
    #[test]
    fn failed_operation_counts_only_if_the_device_does_not_exist() {
        let (operation, _) = operation(OperationState::Failed);
        let present = device(UUID, &operation.plans[0]);
        let history = History::of(UUID, &[present], std::slice::from_ref(&operation), &[]);
        assert!(history.device.is_some() && history.destroyed_by.is_empty(), "{history:?}");
        let gone = text(&History::of(UUID, &[], &[operation], &[]));
        assert!(gone.contains("failed at") && gone.contains("may have destroyed it"), "{gone}");
    }

    /// Fault: if gpushd did not answer a request for an operation, the command left out this operation.
    #[test]
    fn only_an_operation_that_is_no_longer_kept_is_left_out() {
        let failed = |code| Err(Error { kind: Kind::Answer, error: ApiError::new(code, "no operation").into() });
        assert_eq!(if_kept(failed(Code::NotFound)).unwrap(), None);
        assert_eq!(if_kept(failed(Code::Unavailable)).unwrap_err().code(), Code::Unavailable);
        let (operation, _) = operation(OperationState::Done);
        assert_eq!(if_kept(Ok(operation.clone())).unwrap(), Some(operation));
    }
}
