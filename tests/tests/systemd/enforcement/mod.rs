//! Device access, on a real systemd: the kernel denies the GPUs to login sessions, and the scope of a lease opens its own.
//!
//! The machine has no driver, so an open that the kernel allows fails with `ENXIO` (6), and an open that it denies with
//! `EPERM` (1). A program opens a node many times, and prints how often it got which error.
//!
//! A boot takes longer than most steps, so the steps use one machine, in this order.

mod attacks;
mod devices;

use std::time::Instant;

use gpush_tests::{machine::Machine, random::number};
use serde_json::Value;

/// Two GPUs, and a GPU with MIG devices.
const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 2\n\n[[gpu]]\nmodel = \"a100-80\"\nmig = true\n";

const RULES: &str = r#"
[[gpu]]
name = "walls"
match = ["0"]
mode = "timeslice"
timeslice = { replicas = 32 }
lease = "enforced"

[[gpu]]
match = ["1"]
mode = "exclusive"

[[gpu]]
match = ["2"]
mode = "mig"
layout = ["1g.10gb*2"]
lease = "enforced"
"#;

/// Opens a node as often as the second argument says, and prints the number of each error.
const OPENS: &str = r#"#!/usr/bin/perl
my %count;
for (1 .. $ARGV[1]) { $! = 0; sysopen(my $file, $ARGV[0], 2); $count{$! + 0}++; }
print join(",", map { "$_*$count{$_}" } sort keys %count), "\n";
"#;

/// Opens a node until a file exists, and prints the number of each error before and after another file exists. The second
/// argument is the file that ends the program, the third the file in between.
const OPENS_UNTIL: &str = r#"#!/usr/bin/perl
my (%before, %after);
until (-e $ARGV[1]) {
    my $is_after = -e $ARGV[2];
    $! = 0; sysopen(my $file, $ARGV[0], 2); my $error = $! + 0;
    if ($is_after) { $after{$error}++ } else { $before{$error}++ }
}
print join(",", sort keys %before), " ", join(",", sort keys %after), "\n";
"#;

/// Prints the error of each node of a directory.
const OTHERS: &str = r#"#!/usr/bin/perl
for my $node (sort glob "/dev/other/*") { $! = 0; sysopen(my $file, $node, 2|0x800); print "$node ", $! + 0, "\n"; }
for my $node (qw(null zero full random urandom ptmx)) { sysopen(my $f, "/dev/$node", 2) or print "$node ", $! + 0, "\n"; }
"#;

/// How often a session tries to open a GPU while systemd reloads. `GPUSH_TEST_DENIED_OPENS` sets another number.
const DENIED_OPENS: u64 = 1_000_000;

/// The uid of `nobody`.
const ALICE: u32 = 65534;

/// Returns a shell command that runs `line` in a new login session of a user.
fn in_session(uid: u32, session: &str, line: &str) -> String {
    format!(
        "systemd-run --quiet --scope --slice=user-{uid}.slice --unit=session-{session}.scope \
         --uid={uid} --gid={uid} sh -c '{line}'"
    )
}

/// Runs a command in a new login session, and returns its output. Error messages are on one line.
fn session(machine: &Machine, uid: u32, line: &str) -> String {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let name = COUNT.fetch_add(1, Ordering::Relaxed).to_string();
    let output = machine.run(&in_session(uid, &name, line));
    let errors = String::from_utf8_lossy(&output.stderr).split_whitespace().collect::<Vec<_>>().join(" ");
    (String::from_utf8_lossy(&output.stdout) + errors.as_str()).trim_end().to_owned()
}

/// Starts a command in the background, in a new login session. Its output goes to `/srv/SESSION`.
fn start_in_session(machine: &Machine, session: &str, line: &str) {
    let line = in_session(ALICE, session, line);
    machine.write(&format!("/srv/{session}.sh"), format!("{line} > /srv/{session} 2>&1\n"));
    machine.sh(&format!("systemd-run --quiet --unit=of-{session} --collect sh /srv/{session}.sh"));
}

/// Waits for the output of a background command.
fn output(machine: &Machine, session: &str) -> String {
    machine.await_that(session, |machine| machine.run(&format!("test -s /srv/{session}")).status.success());
    machine.sh(&format!("cat /srv/{session}"))
}

fn enforcement(machine: &Machine) -> Value {
    let output = machine.run("gpushctl enforce status --json");
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

fn machine() -> Option<Machine> {
    let machine = Machine::boot("the device access of login sessions")?;
    machine.install();
    machine.simulated_host(HOST);
    machine.write("/var/lib/gpush-sim/proc/devices", "Character devices:\n195 nvidia\n236 nvidia-caps\n");
    machine.sh("chmod 1777 /var/lib/gpush-sim/proc");
    machine.write("/etc/gpush/config.toml", RULES);
    for (path, program) in [("opens", OPENS), ("opens-until", OPENS_UNTIL), ("others", OTHERS)] {
        machine.put(&format!("/usr/local/bin/{path}"), program);
    }
    machine.sh(
        "for minor in 0 1 2; do mknod -m 666 /dev/nvidia$minor c 195 $minor; done; mknod -m 666 /dev/nvidiactl c 195 255
         mknod -m 666 /srv/another-name c 195 0; mkdir -p /dev/other /dev/nvidia-caps
         for major in 1 4 5 7 10 13 21 29 81 89 116 136 180 188 194 196 226 234 236 240 254 384 509 511; do
             mknod -m 666 /dev/other/c$major c $major 77; done
         for major in 7 8 65 195 259; do mknod -m 666 /dev/other/b$major b $major 77; done
         for cap in $(seq 1 400); do mknod -m 666 /dev/nvidia-caps/nvidia-cap$cap c 236 $cap; done",
    );
    // A service in the place of cron, which opens a GPU on request.
    machine.write(
        "/etc/systemd/system/cron.service",
        "[Service]\nExecStart=/bin/sh -c 'mkfifo -m 600 /srv/cron; while :; do read x < /srv/cron && opens /dev/nvidia0 10 > /srv/cron.out; done'\n",
    );
    machine.sh("systemctl daemon-reload; systemctl start cron.service gpushd.service");
    keep_slices(&machine);
    ready(&machine, 3);
    machine.sh("gpushctl apply --yes");
    Some(machine)
}

/// Keeps a process in the slice of each user: else the end of one session would stop the slice while the next begins.
fn keep_slices(machine: &Machine) {
    for uid in [0, ALICE] {
        machine.sh(&format!("systemd-run --quiet --slice=user-{uid}.slice --unit=stays-{uid} sleep infinity"));
    }
}

/// Waits until so many GPUs can be leased.
fn ready(machine: &Machine, count: usize) {
    machine.await_that("the GPUs can be leased", |machine| {
        let output = machine.run("gpushctl gpu list --json");
        let gpus: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap_or_default();
        gpus.len() == count && gpus.iter().all(|gpu| gpu["state"] == "ready")
    });
}

/// Opens a node from the service in the place of cron.
fn in_cron(machine: &Machine) -> String {
    machine.sh("rm -f /srv/cron.out; echo go > /srv/cron");
    output(machine, "cron.out")
}

#[test]
fn kernel_denies_gpus_to_sessions_and_opens_those_of_a_lease() {
    let Some(machine) = machine() else { return };
    rule_without_the_hosts_part_grants_nothing(&machine);
    let others = session(&machine, ALICE, "others");
    start_in_session(&machine, "running", "until [ -e /srv/on ]; do sleep 0.05; done; opens /dev/nvidia0 1000");
    machine.sh("gpushctl enforce plan");
    let on = machine.sh("gpushctl enforce on");
    assert!(on.starts_with("Enforced:"), "{on}");
    machine.sh("touch /srv/on");
    assert_eq!(output(&machine, "running"), "1*1000", "a session that ran before");
    sessions_cannot_open_gpus(&machine);
    assert_eq!(session(&machine, ALICE, "others"), others, "all other devices open as before");
    units_of_the_user_manager_cannot_open_gpus(&machine);
    assert_eq!(in_cron(&machine), "1*10");
    assert_eq!(machine.sh("systemd-run --quiet --wait --pipe --uid=65534 opens /dev/nvidia0 10"), "6*10", "a service");
    assert_eq!(session(&machine, 0, "gpushctl enforce shell -- opens /dev/nvidia0 10"), "6*10");
    assert!(session(&machine, ALICE, "gpushctl enforce shell -- true").contains("may not"));
    lease_opens_its_own_gpu(&machine, &others);
    lease_opens_its_own_mig_device(&machine);
    command_of_another_session_enters_a_lease(&machine);
    end_of_a_lease_closes_its_gpu(&machine);
    reloads_open_nothing(&machine);
    restart_of_gpushd_opens_nothing(&machine);
    attacks::other_identity_does_not_open(&machine);
    attacks::unit_with_the_name_of_a_lease_does_not_open(&machine);
    attacks::frozen_and_killed_programs_open_nothing_after_the_end(&machine);
    allowed_probe_is_reported(&machine);
    off_restores_everything(&machine);
    removal_of_the_package_restores_everything(&machine);
}

fn rule_without_the_hosts_part_grants_nothing(machine: &Machine) {
    assert_eq!(session(machine, ALICE, "opens /dev/nvidia0 10"), "6*10", "the kernel allows the open");
    let found = enforcement(machine);
    assert_eq!((&found["state"], &found["enforced_gpus"]), (&"off".into(), &serde_json::json!([0, 2])), "{found}");
    assert_eq!(machine.run("gpushctl enforce status").status.code(), Some(3));
    let refused = session(machine, ALICE, "gpushctl run -g 0 -- true");
    assert!(refused.contains("the host does not enforce it") && refused.contains("gpushctl enforce on"), "{refused}");
    let status = machine.sh("gpushctl status 2>&1 | tr -s '\\n ' ' '");
    assert!(status.contains("leases of GPUs 0, 2 are not enforced"), "{status}");
}

fn sessions_cannot_open_gpus(machine: &Machine) {
    assert_eq!(session(machine, ALICE, "opens /dev/nvidia0 1000"), "1*1000");
    for node in ["/dev/nvidia1", "/dev/nvidiactl", "/srv/another-name"] {
        assert_eq!(session(machine, ALICE, &format!("opens {node} 10")), "1*10", "{node}");
    }
    assert_eq!(session(machine, 0, "opens /dev/nvidia0 10"), "1*10", "root in a session");
    let made = session(machine, 0, "mknod /srv/made c 195 1 || test ! -e /srv/made && echo denied");
    assert!(made.contains("Operation not permitted") && made.contains("denied"), "{made}");
    let bound = session(machine, 0, "touch /srv/bound && mount --bind /dev/nvidia1 /srv/bound && opens /srv/bound 10");
    assert_eq!(bound, "1*10", "another path of the node");
    assert_eq!(machine.sh("opens /srv/bound 10"), "6*10", "the mount is there");
}

fn units_of_the_user_manager_cannot_open_gpus(machine: &Machine) {
    machine.write(
        "/etc/systemd/system/user@.service.d/test.conf",
        "[Service]\nEnvironment=XDG_RUNTIME_DIR=/run/user/%i HOME=/\n",
    );
    machine.sh(&format!("systemctl daemon-reload; systemctl start user@{ALICE}.service"));
    machine.put("/usr/local/bin/opens-to", "#!/bin/sh\nopens /dev/nvidia0 10 > $1\n");
    machine.sh("install -d -m 1777 /srv/user");
    let run = |name: &str, options: &str| {
        let line =
            format!("XDG_RUNTIME_DIR=/run/user/{ALICE} systemd-run --user --quiet {options} opens-to /srv/user/{name}");
        assert_eq!(session(machine, ALICE, &line), "");
        output(machine, &format!("user/{name}"))
    };
    assert_eq!(run("scope", "--scope"), "1*10");
    assert_eq!(run("service", ""), "1*10");
    let allows_itself = "--property=DevicePolicy=auto \"--property=DeviceAllow=char-* rwm\"";
    assert_eq!(run("allowed", allows_itself), "1*10", "a service that allows itself");
}

/// Returns the lines of `others` about devices whose drivers are loaded, and about block devices.
fn of_loaded_drivers(machine: &Machine, lines: &str) -> Vec<String> {
    let majors = machine.sh("awk '/^Block/ { exit } $1 ~ /^[0-9]+$/ { print $1 }' /proc/devices");
    let is_loaded = |line: &&str| match line.strip_prefix("/dev/other/c").and_then(|rest| rest.split(' ').next()) {
        Some(major) => majors.lines().any(|one| one == major),
        None => true,
    };
    let found: Vec<String> = lines.lines().filter(is_loaded).map(str::to_owned).collect();
    assert!(found.len() > 8, "{lines}");
    found
}

fn lease_opens_its_own_gpu(machine: &Machine, others: &str) {
    assert_eq!(session(machine, ALICE, "gpushctl run -q -g 0 -- opens /dev/nvidia0 1000"), "6*1000");
    assert_eq!(session(machine, ALICE, "gpushctl run -q -g 0 -- opens /dev/nvidiactl 10"), "6*10");
    assert_eq!(session(machine, ALICE, "gpushctl run -q -g 0 -- opens /dev/nvidia1 10"), "1*10");
    // A rule that does not enforce leases gives no access to the GPUs of others.
    assert_eq!(session(machine, ALICE, "gpushctl run -q -g 1 -- opens /dev/nvidia1 10"), "6*10");
    assert_eq!(session(machine, ALICE, "gpushctl run -q -g 1 -- opens /dev/nvidia0 10"), "1*10");
    // MIG capabilities are denied, too: 236.
    let found = session(machine, ALICE, "gpushctl run -q -g 0 -- others");
    assert_eq!(of_loaded_drivers(machine, &found), of_loaded_drivers(machine, others), "they open as before");
    assert!(found.contains("/dev/other/c236 1"), "{found}");
    let refused = session(machine, ALICE, "gpushctl lease request -g 0 --for 1h");
    assert!(refused.contains("in a login session") && refused.contains("gpushctl run -- COMMAND"), "{refused}");
    let refused = session(machine, ALICE, "gpushctl lease env -g 0 --for 1h");
    assert!(refused.contains("gpushctl run -- COMMAND"), "{refused}");
    machine.await_that("nothing is left of the scopes", |machine| {
        machine.sh("find /run/systemd -name \"*gpulease-*.scope*\"").is_empty()
    });
}

fn lease_opens_its_own_mig_device(machine: &Machine) {
    let caps = machine.sh(
        "cat /var/lib/gpush-sim/proc/driver/nvidia/capabilities/gpu2/mig/gi*/access | sed -n s/DeviceFileMinor:.//p",
    );
    let caps: Vec<&str> = caps.lines().collect();
    assert_eq!(caps.len(), 2, "{caps:?}");
    let opens: Vec<String> = caps.iter().map(|cap| format!("opens /dev/nvidia-caps/nvidia-cap{cap} 1")).collect();
    let line = format!("gpushctl run -q -g 2 --mig 1g.10gb -- sh -c \"opens /dev/nvidia2 1; {}\"", opens.join("; "));
    let found = session(machine, ALICE, &line);
    let mut results: Vec<&str> = found.lines().collect();
    assert_eq!(results.remove(0), "6*1", "{found}");
    results.sort_unstable();
    assert_eq!(results, ["1*1", "6*1"], "one of both GPU instances belongs to the lease");
}

/// `run --lease` in another session, in which the kernel denies the GPU.
fn command_of_another_session_enters_a_lease(machine: &Machine) {
    start_in_session(
        machine,
        "first",
        "gpushctl run -q -g 0 -- sh -c \"echo \\$GPUSH_LEASE; until [ -e /srv/left ]; do sleep 0.05; done\"",
    );
    let id = output(machine, "first");
    let enter = |line: &str| session(machine, ALICE, &format!("gpushctl run -q --lease {id} -- {line}"));
    assert_eq!(enter("opens /dev/nvidia0 10"), "6*10");
    assert_eq!(enter("opens /dev/nvidia1 10"), "1*10");
    let line = format!("gpushctl run -q --lease {id} -- opens-until /dev/nvidia0 /srv/second /srv/released");
    start_in_session(machine, "entered", &line);
    machine.await_that("the program runs", is_opening);
    let status = machine.sh("gpushctl status 2>&1; true");
    assert!(!status.contains("does not know"), "{status}");
    machine.sh(&format!(
        "gpushctl lease end {id} --reason test && touch /srv/released; sleep 0.2; touch /srv/second /srv/left"
    ));
    assert!(output(machine, "entered").ends_with(" 1"), "the end of the lease closes its GPU here, too");
    machine.await_that("the lease has ended", |machine| machine.sh("gpushctl lease list --json") == "[]");
}

fn is_opening(machine: &Machine) -> bool {
    machine.run("pgrep -f '^/usr/bin/perl .*opens-until'").status.success()
}

fn end_of_a_lease_closes_its_gpu(machine: &Machine) {
    start_in_session(
        machine,
        "closing",
        "gpushctl run -q -g 0 -- opens-until /dev/nvidia0 /srv/done /srv/acknowledged",
    );
    machine.await_that("the program runs", is_opening);
    let leases: Vec<Value> = serde_json::from_str(&machine.sh("gpushctl lease list --json")).expect("JSON");
    assert_eq!(leases[0]["device_access"], "verified", "{leases:?}");
    let id = leases[0]["id"].as_str().expect("an id").to_owned();
    machine
        .sh(&format!("gpushctl lease end {id} --reason test && touch /srv/acknowledged; sleep 0.2; touch /srv/done"));
    assert!(output(machine, "closing").ends_with(" 1"), "no open after the end was acknowledged");
}

/// A session tries to open a GPU while systemd reloads its units, and executes itself again.
fn reloads_open_nothing(machine: &Machine) {
    let (count, begun) = (number("GPUSH_TEST_DENIED_OPENS", DENIED_OPENS), Instant::now());
    start_in_session(machine, "reloads", &format!("/opt/built/device_opens count /dev/nvidia0 {count}"));
    let mut rounds = 0;
    while !machine.run("test -s /srv/reloads").status.success() {
        machine.sh("for i in 1 2 3 4 5; do systemctl daemon-reload; done; systemctl daemon-reexec");
        rounds += 1;
    }
    println!("{count} opens in {:.1} s, with {rounds} times 5 reloads and a reexec", begun.elapsed().as_secs_f64());
    assert_eq!(output(machine, "reloads"), format!("1*{count}"));
    machine.await_that("gpushd has checked again", |machine| enforcement(machine)["state"] == "verified");
}

fn restart_of_gpushd_opens_nothing(machine: &Machine) {
    machine.sh("systemctl stop gpushd.service gpushd.socket gpushd-admin.socket");
    assert_eq!(session(machine, ALICE, "opens /dev/nvidia0 10"), "1*10");
    machine.sh("systemctl start gpushd.socket gpushd-admin.socket gpushd.service");
    machine.await_that("gpushd has verified it", |machine| enforcement(machine)["state"] == "verified");
}

/// An administrator opens the slice, and gpushd says so.
fn allowed_probe_is_reported(machine: &Machine) {
    machine.sh("systemctl set-property user.slice 'DeviceAllow=/dev/nvidia0 rw'; systemctl daemon-reload");
    machine.await_that("gpushd reports it", |machine| enforcement(machine)["state"] == "off");
    machine.sh("gpushctl enforce on");
    assert_eq!(enforcement(machine)["state"], "verified");
}

fn off_restores_everything(machine: &Machine) {
    let off = machine.sh("gpushctl enforce off");
    assert!(off.starts_with("Not enforced:"), "{off}");
    assert_eq!(session(machine, ALICE, "opens /dev/nvidia0 10"), "6*10");
    assert_eq!(in_cron(machine), "6*10");
    machine.sh("systemctl daemon-reload");
    assert_eq!(session(machine, ALICE, "opens /dev/nvidia0 10"), "6*10");
    for unit in ["user.slice", "cron.service"] {
        assert_eq!(machine.property(unit, "DevicePolicy"), "auto");
        assert_eq!(machine.property(unit, "DeviceAllow"), "");
    }
    assert_eq!(enforcement(machine)["state"], "off");
}

fn removal_of_the_package_restores_everything(machine: &Machine) {
    machine.sh("gpushctl enforce on");
    assert_eq!(session(machine, ALICE, "opens /dev/nvidia0 10"), "1*10");
    machine.sh("systemctl stop gpushd.service gpushd.socket gpushd-admin.socket; sh -e /opt/gpush/packaging/scripts/open-gpus.sh");
    assert_eq!(session(machine, ALICE, "opens /dev/nvidia0 10"), "6*10");
    assert_eq!(in_cron(machine), "6*10");
    assert_eq!(machine.sh("find /etc/systemd/system.control -type f 2>/dev/null; true"), "");
    assert_eq!(machine.property("user.slice", "DeviceAllow"), "");
}
