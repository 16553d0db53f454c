//! The comment for administrators in Slurm's accounting: what a job used on this node. Epilog writes it with scontrol if
//! `slurm.admin_comment` is set. It is only information, so a failure changes nothing for the job.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use gpush_api::{Lease, LeaseUsageSummary, MemberShare};
use gpush_core::duration;

use crate::report::print_error;

/// How long Epilog waits for the final sums of a lease that has just ended.
pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

/// Time limit of scontrol. slurmctld can be slow when many jobs end.
const LIMIT: Duration = Duration::from_secs(5);

/// Pause between two checks whether scontrol has ended.
const PAUSE: Duration = Duration::from_millis(20);

/// Returns the comment about the leases of a job; `None` if it had none.
pub(crate) fn text(leases: &[Lease]) -> Option<String> {
    if leases.is_empty() {
        return None;
    }
    let of_leases: Vec<String> = leases.iter().map(of_lease).collect();
    Some(format!("gpush: {}", of_leases.join("; ")))
}

/// Describes a lease: `L17 1g.10gb, held 3h12m, busy 82 %, memory 9.1 GiB, 320 Wh (gpm)`.
fn of_lease(lease: &Lease) -> String {
    let shares: Vec<String> = lease.members.iter().map(|member| share(&member.share)).collect();
    let share = match shares.as_slice() {
        [] => String::new(),
        [one] => format!(" {one}"),
        [one, ..] => format!(" {}x {one}", shares.len()),
    };
    let of_use = lease.usage.as_ref().map_or_else(|| ", use not known".to_owned(), used);
    format!("{}{share}{of_use}", lease.id)
}

fn share(share: &MemberShare) -> String {
    match share {
        MemberShare::Mig { profile } => profile.clone(),
        MemberShare::Mps { percentage, .. } => format!("mps {percentage} %"),
        MemberShare::Timeslice { replicas, .. } => format!("timeslice 1/{replicas}"),
        MemberShare::Whole => "whole GPU".to_owned(),
    }
}

fn used(usage: &LeaseUsageSummary) -> String {
    let held = usage.busy_s + usage.idle_s + usage.empty_s + usage.unknown_s;
    let busy = (usage.busy_s * 100).checked_div(held).unwrap_or(0);
    #[expect(clippy::cast_precision_loss, reason = "the text has one decimal")]
    let memory = usage.memory_peak_mib.map(|mib| format!(", memory {:.1} GiB", mib as f64 / 1024.0));
    let energy = usage.energy_j.map(|joules| format!(", {:.1} Wh ({})", joules / 3600.0, usage.energy_method.name()));
    format!(
        ", held {}, busy {busy} %{}{}",
        duration::rough(held),
        memory.unwrap_or_default(),
        energy.unwrap_or_default()
    )
}

/// Writes the comment with scontrol, but waits no longer than until a time.
pub(crate) fn write(scontrol: &str, job: u32, comment: &str, until: Instant) {
    let until = until.min(Instant::now() + LIMIT);
    let mut command = Command::new(scontrol);
    command.args(["update", &format!("JobId={job}"), &format!("AdminComment={comment}")]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let failed = match command.spawn() {
        Err(error) => Some(error.to_string()),
        Ok(mut child) => loop {
            match child.try_wait() {
                Ok(Some(status)) => break (!status.success()).then(|| status.to_string()),
                Ok(None) if Instant::now() < until => std::thread::sleep(PAUSE),
                Ok(None) => {
                    let _ = child.kill();
                    let _ = child.wait();
                    break Some("it did not end in time".to_owned());
                }
                Err(error) => break Some(error.to_string()),
            }
        },
    };
    if let Some(why) = failed {
        print_error(&format!("gpush: job {job}: the comment was not written with {scontrol}: {why}"));
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::{
        EnergyMethod, LeaseBinding, LeaseHolder, LeaseId, LeaseKind, LeaseMember, LeaseState, Priority, UseState,
    };
    use jiff::Timestamp;

    use super::*;

    fn lease(id: u64, kind: LeaseKind, shares: Vec<MemberShare>, usage: Option<LeaseUsageSummary>) -> Lease {
        let member = |share| LeaseMember {
            target: "GPU-1".into(),
            gpu_uuid: "GPU-1".into(),
            share,
            memory_mib: 9856,
            gpu_memory_mib: 81_920,
        };
        Lease {
            id: LeaseId(id),
            holder: LeaseHolder { uid: 1000, user: None },
            account: None,
            asked_by: None,
            kind,
            enforcement: kind.enforcement(),
            device_access: None,
            state: LeaseState::Ended,
            reason: None,
            request: None,
            members: shares.into_iter().map(member).collect(),
            binding: LeaseBinding::Time,
            operation: None,
            created_at: Timestamp::UNIX_EPOCH,
            granted_at: None,
            expires_at: None,
            ended_at: None,
            queue: None,
            waits_for: Vec::new(),
            revocation: None,
            notice: None,
            usage,
            keep: None,
            idle: None,
            over_limit: None,
        }
    }

    #[test]
    fn comment_names_share_use_and_energy() {
        let usage = LeaseUsageSummary {
            state: Some(UseState::Idle),
            reason: None,
            weak: false,
            unused_since: None,
            unused_s: None,
            busy_s: 3_600,
            idle_s: 7_500,
            empty_s: 0,
            unknown_s: 60,
            process_count: None,
            memory_mib: None,
            memory_peak_mib: Some(10_240),
            energy_j: Some(43_200.0),
            energy_method: EnergyMethod::Gpm,
            energy_mixed: false,
            power_limited: None,
            thermal_limited: None,
        };
        let device = MemberShare::Mig { profile: "1g.10gb".to_owned() };
        let used = lease(18, LeaseKind::Mig, vec![device.clone(), device], Some(usage));
        let (percentage, priority) = ("25".parse().unwrap(), Priority::Normal);
        let mps = MemberShare::Mps { percentage, memory_limit_mib: None, priority };
        let without = lease(17, LeaseKind::Mps, vec![mps], None);
        let text = text(&[used, without]).unwrap();
        assert_eq!(
            text,
            "gpush: L18 2x 1g.10gb, held 3h6m, busy 32 %, memory 10.0 GiB, 12.0 Wh (gpm); L17 mps 25 %, use not known"
        );
        assert_eq!(super::text(&[]), None);
    }

    #[test]
    fn scontrol_that_fails_or_hangs_ends_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("scontrol");
        let script = |body: &str| {
            use std::os::unix::fs::PermissionsExt as _;
            std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        };
        let out = dir.path().join("out");
        let until = || Instant::now() + Duration::from_secs(60);
        script(&format!("printf '%s|' \"$@\" > {}", out.display()));
        write(path.to_str().unwrap(), 812, "gpush: L17, busy 3 %", until());
        assert_eq!(std::fs::read_to_string(&out).unwrap(), "update|JobId=812|AdminComment=gpush: L17, busy 3 %|");
        script("exec sleep 600");
        write(path.to_str().unwrap(), 812, "x", Instant::now() + Duration::from_millis(50));
        write("/nonexistent/scontrol", 812, "x", until());
    }
}
