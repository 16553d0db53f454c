//! Limits of a user's slice, which also apply to the slice of the user's leases.

use super::{ALICE, RULES, in_session, machine, none_left};

const RUN: &str = "gpushctl run --timeslice -- true";

/// Fault: `gpushctl run` moved its command out of `user-UID.slice`, and the limits of this slice did not apply.
#[test]
fn limits_of_user_slice_apply_to_slice_of_leases() {
    let Some(machine) = machine("limits of users") else { return };
    let (user, leases) = (format!("user-{ALICE}.slice"), format!("gpulease-{ALICE}.slice"));
    let limit = |limits: &str| machine.sh(&format!("systemctl set-property --runtime {user} {limits}"));
    let run = |session: &str| machine.run(&in_session(ALICE, session, RUN));
    limit("MemoryMax=300M CPUQuota=150% TasksMax=77 IPAddressDeny=192.0.2.0/24");
    assert!(run("1").status.success());
    let properties = ["MemoryMax", "CPUQuotaPerSecUSec", "TasksMax", "IPAddressDeny"];
    let of = |slice: &str| properties.map(|name| machine.property(slice, name));
    assert_eq!((of(&leases), of(&leases)[0].as_str()), (of(&user), "314572800"));
    assert!(of(&leases)[1].starts_with("1.500") && of(&leases)[2..] == ["77", "192.0.2.0/24"], "{:?}", of(&leases));

    // The limits are read again for the next scope. The drop-in of the slice has a limit for tasks.
    limit("MemoryMax=infinity CPUQuota= TasksMax=infinity IPAddressDeny=");
    assert!(run("2").status.success());
    assert_eq!(of(&leases), ["infinity", "infinity", "infinity", ""]);

    // A device policy is not carried over: only leases give access to devices.
    limit("DevicePolicy=closed");
    assert!(run("3").status.success());
    assert_eq!(machine.property(&leases, "DevicePolicy"), "auto");
    let doctor = machine.run("gpushctl doctor --only security");
    let printed = String::from_utf8_lossy(&doctor.stdout).into_owned();
    assert!(printed.contains(&format!("{user}: DevicePolicy")), "{printed}");

    machine.write("/etc/gpush/config.toml", format!("[leases]\nuser_limits = \"require\"\n{RULES}"));
    machine.sh("gpushctl config reload");
    let refused = run("4");
    let why = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(125), "{why}");
    assert!(why.contains(&format!("properties of {user}:")) && why.contains("DevicePolicy"), "{why}");
    limit("DevicePolicy=auto");
    assert!(run("5").status.success());
    none_left(&machine);
}
