//! `gpushctl explain MIG-…`: where a MIG device is, or what became of it.
//!
//! The answer is composed of what gpushd keeps: the MIG devices, the last operations with their plans, and the last
//! leases. A user sees only what these lists show to this user.

use std::fmt::Write as _;

use gpush_api::{GpuPlan, InstanceStep, Lease, LeaseState, MigDevice, Operation, OperationState};
use gpush_client::Client;
use jiff::Timestamp;
use serde::Serialize;

use crate::{
    exit::{Failure, Outcome},
    output::Output,
    render::Appearance,
};

/// Number of operations and of ended leases that are searched. gpushd keeps at most 1000 of each.
const OPERATIONS: usize = 200;
const LEASES: usize = 1000;

/// What is known about a MIG device: the output of `--json`.
#[derive(Debug, Serialize)]
pub(super) struct History {
    uuid: String,
    /// Name of the device in commands, such as `0:3g.40gb@4`, if it exists.
    device: Option<String>,
    /// The operations that destroyed it, the last one first.
    destroyed_by: Vec<Destroyed>,
    /// Its leases, the last one first.
    used_by: Vec<UsedBy>,
}

/// An operation that destroyed the device.
#[derive(Debug, Serialize)]
struct Destroyed {
    operation_id: String,
    kind: String,
    user: String,
    at: Timestamp,
    gpu: u32,
    /// Name of the device in commands at that time, such as `0:3g.40gb@4`.
    place: String,
    /// MIG devices that the GPU has now, by name.
    present_devices: Vec<String>,
}

/// A lease of the device.
#[derive(Debug, Serialize)]
struct UsedBy {
    lease_id: String,
    user: String,
    from: Option<Timestamp>,
    until: Option<Timestamp>,
}

/// Exit status 0 if the device exists, otherwise 2.
pub(super) async fn run(client: &mut Client, uuid: &str, out: &Output) -> Outcome {
    let devices = client.mig_devices().await?;
    let operations = operations(client).await?;
    let history = History::of(uuid, &devices, &operations, &client.leases(LEASES).await?);
    out.show(&history, |look| history.text(look))?;
    Ok(if history.device.is_some() { 0 } else { gpush_api::Code::NotFound.exit_status() })
}

/// Returns the last operations, the last one first.
async fn operations(client: &mut Client) -> Result<Vec<Operation>, Failure> {
    let mut operations = Vec::new();
    for one in client.last_operations(OPERATIONS, None).await? {
        // An operation that is no longer kept by now is left out.
        operations.extend(client.operation(&one.id).await.ok());
    }
    operations.sort_by_key(|one| std::cmp::Reverse(one.created_at));
    Ok(operations)
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
        let device = devices.iter().find(|one| one.uuid.as_deref().is_some_and(same)).map(name);
        let mut destroyed = Vec::new();
        // An operation that was rolled back has created the device again.
        let took_effect = |one: &&Operation| matches!(one.state, OperationState::Done | OperationState::Failed);
        for operation in operations.iter().filter(took_effect) {
            for plan in &operation.plans {
                let found = plan.instance_steps().find_map(|step| match step {
                    InstanceStep::DestroyCompute { gi, profile, uuid: Some(other), .. } if same(other) => {
                        Some((*gi, profile))
                    }
                    _ => None,
                });
                let Some((gi, profile)) = found else { continue };
                destroyed.push(Destroyed {
                    operation_id: operation.id.clone(),
                    kind: operation.kind.clone(),
                    user: operation.by.user.clone().unwrap_or_else(|| format!("uid {}", operation.by.uid)),
                    at: operation.ended_at.unwrap_or(operation.created_at),
                    gpu: plan.gpu,
                    place: place(plan, gi, profile),
                    present_devices: devices.iter().filter(|one| one.gpu_uuid == plan.uuid).map(name).collect(),
                });
            }
        }
        let mut used: Vec<UsedBy> = leases
            .iter()
            .filter(|lease| lease.members.iter().any(|member| same(&member.target)))
            .map(|lease| UsedBy {
                lease_id: lease.id.to_string(),
                user: lease.holder.user.clone().unwrap_or_else(|| format!("uid {}", lease.holder.uid)),
                from: lease.granted_at,
                until: lease.ended_at.filter(|_| lease.state == LeaseState::Ended),
            })
            .collect();
        used.sort_by_key(|one| std::cmp::Reverse(one.from));
        Self { uuid: uuid.to_owned(), device, destroyed_by: destroyed, used_by: used }
    }

    fn text(&self, look: &Appearance) -> String {
        let clean = |text: &str| look.clean(text);
        let at = |time: Timestamp| time.strftime("%Y-%m-%d %H:%M:%S UTC").to_string();
        let uuid = clean(&self.uuid);
        let mut text = match &self.device {
            Some(device) => format!("{uuid} is the MIG device {}\n", clean(device)),
            None => format!("{uuid} does not exist now\n"),
        };
        for one in &self.destroyed_by {
            let _ = writeln!(
                text,
                "  destroyed by {} ({} of {}) at {}: it was {}",
                clean(&one.operation_id),
                clean(&one.kind),
                clean(&one.user),
                at(one.at),
                clean(&one.place)
            );
        }
        if let Some(last) = self.destroyed_by.first().filter(|_| self.device.is_none()) {
            let now = if last.present_devices.is_empty() {
                "no MIG device".to_owned()
            } else {
                clean(&last.present_devices.join(", "))
            };
            let _ = writeln!(text, "  GPU {} has now: {now}", last.gpu);
        }
        for one in &self.used_by {
            let from = one.from.map_or_else(String::new, |from| format!(" from {}", at(from)));
            let until = one.until.map_or_else(String::new, |until| format!(" until {}", at(until)));
            let _ = writeln!(text, "  leased by {} ({}){from}{until}", clean(&one.user), one.lease_id);
        }
        if self.device.is_none() && self.destroyed_by.is_empty() && self.used_by.is_empty() {
            let _ = writeln!(
                text,
                "  no operation of the last {OPERATIONS} destroyed it, and no lease of the last {LEASES} had it: \
                a reboot or a reset removes all MIG devices"
            );
        }
        if self.device.is_none() {
            let place = self.destroyed_by.first().map_or("0:3g.40gb@4".to_owned(), |last| clean(&last.place));
            let _ = writeln!(
                text,
                "hint: in units and compose files, name the place of the device instead of its UUID: `gpushctl run \
                --target {place} -- COMMAND`; `gpushctl mig list` shows the places"
            );
        }
        text
    }
}

#[cfg(test)]
pub(super) mod tests {
    use gpush_api::{Placement, Step};

    use super::*;
    use crate::render::{Charset, fixtures};

    const UUID: &str = "MIG-5d1b03a2-0000-4000-8000-00000000000b";

    /// An operation that has destroyed the device [`UUID`], with the place of the device.
    fn operation(state: OperationState) -> (Operation, String) {
        let mut operation = fixtures::operation(state);
        let step = |uuid: &str| {
            let (profile, uuid) = ("3g.40gb".to_owned(), Some(uuid.to_owned()));
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

    /// A stale UUID was a dead end: nothing said what had become of the device.
    #[test]
    fn destroyed_device_names_its_operation_and_its_place() {
        let (operation, place) = operation(OperationState::Done);
        let history = History::of(&UUID.to_uppercase(), &[], std::slice::from_ref(&operation), &[]);
        let text = history.text(&fixtures::look(100, Charset::Ascii));
        assert!(history.device.is_none() && history.destroyed_by.len() == 1, "{history:?}");
        for part in ["does not exist now", &operation.id, &format!("it was {place}"), &format!("--target {place} --")] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
    }

    #[test]
    fn operation_that_was_rolled_back_has_destroyed_nothing() {
        let (operation, _) = operation(OperationState::RolledBack);
        assert!(History::of(UUID, &[], &[operation], &[]).destroyed_by.is_empty());
    }
}
