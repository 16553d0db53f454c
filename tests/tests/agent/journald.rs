//! gpushd and journald. `journalctl GPUSH_GPU=…` finds entries by the fields that gpushd sets. If
//! journald hangs, restarts or is missing, gpushd continues, and reports how many messages were
//! lost.
//!
//! Each test replaces journald. In a mount namespace that only gpushd uses, the test binds a socket
//! at the path of journald.

use std::{
    fs::{self, File},
    os::unix::{fs::MetadataExt, net::UnixDatagram, process::CommandExt},
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

use gpush_api::OperationState;
use gpush_tests::{
    agent::{Agent, PATIENCE, Setup},
    host::Host,
};
use serde_json::json;

/// A script that mounts the directory with the test's socket at the path of journald, and then
/// executes its other arguments.
const INSIDE: &str = "mount -t tmpfs none /run && mkdir -p /run/systemd/journal && mount --bind \"$0\" \
                      /run/systemd/journal && exec \"$@\"";

/// Returns whether the test can mount file systems in a separate namespace. If not, prints that the
/// test `what` is skipped.
fn can_mount(what: &str) -> bool {
    let mut tried = Command::new("unshare");
    tried.args(["-m", "sh", "-c", "mount -t tmpfs none /run"]).process_group(0);
    let can = tried.output().is_ok_and(|output| output.status.success());
    if !can {
        println!("SKIPPED {what}: this host permits no mount namespace (root needs a kernel that permits it)");
    }
    can
}

/// Reads messages from the journal's socket, up to a message that contains `says`.
fn read_until(journal: &UnixDatagram, says: &str) -> Vec<String> {
    let until = Instant::now() + PATIENCE;
    let (mut messages, mut buffer) = (Vec::new(), vec![0; 256 << 10]);
    journal.set_read_timeout(Some(Duration::from_millis(100))).expect("a timeout can be set");
    loop {
        assert!(Instant::now() < until, "nothing of {says:?} in {} messages: {:?}", messages.len(), messages.last());
        let Ok(length) = journal.recv(&mut buffer) else { continue };
        messages.push(String::from_utf8_lossy(&buffer[..length]).into_owned());
        if messages.last().is_some_and(|message| message.contains(says)) {
            return messages;
        }
    }
}

/// Returns the value of a field of an entry. In journald's protocol, a field is the name, then the
/// length of the value in eight bytes, then the value.
fn field<'m>(message: &'m str, name: &str) -> Option<&'m str> {
    let (_, rest) = message.split_once(&format!("\n{name}\n"))?;
    rest.get(8..)?.lines().next()
}

fn start(host: &Host, directory: &Path) -> Agent {
    start_with(host, directory, "")
}

fn start_with(host: &Host, directory: &Path, config: &str) -> Agent {
    let stderr = File::create(host.scratch("stderr")).expect("a file");
    let stat = stderr.metadata().expect("it is there");
    let through = ["unshare", "-m", "sh", "-c", INSIDE, directory.to_str().expect("a path of ours")];
    let setup = Setup::on(host).config(config).through(&through).stderr(stderr.into());
    // If standard error is connected to the journal, systemd sets this variable.
    setup.env("JOURNAL_STREAM", format!("{}:{}", stat.dev(), stat.ino())).start()
}

/// Changes the layout of GPU 0 and changes it back, `rounds` times. Each round logs some lines.
fn work(agent: &Agent, rounds: usize) {
    for _ in 0..rounds {
        for layout in [&["7g.80gb"][..], &["1g.10gb*2"]] {
            assert_eq!(agent.apply_once(&["0"], layout).state, OperationState::Done);
        }
    }
}

#[test]
fn stopped_journald_delays_nothing_and_loss_is_reported() {
    if !can_mount("a journal that is stopped") {
        return;
    }
    let host = Host::up("dgx-a100");
    let directory = host.scratch("journal");
    fs::create_dir(&directory).expect("a directory");
    let socket = directory.join("socket");
    let journal = UnixDatagram::bind(&socket).expect("a socket");
    let agent = start(&host, &directory);
    work(&agent, 1);
    let reported = read_until(&journal, "GPUSH_OPERATION");
    // CODE_FILE and TARGET name the code that logged the event, not the code of the thread that
    // writes the log.
    let entry = reported.last().expect("the entry of an operation");
    // In journald's protocol, the length of the value is between the name and the value.
    assert!(entry.contains("CODE_FILE") && entry.contains("agent/src/operations/apply/"), "{entry}");
    assert!(entry.contains("TARGET") && entry.contains("gpushd::operations::apply::"), "{entry}");
    assert!(entry.contains("\nGPUSH_OPERATION"), "{entry}");
    // Skip the first message: it is empty, because gpushd only uses it to check whether a journal
    // exists.
    assert!(reported.iter().skip(1).all(|message| message.contains("SYSLOG_IDENTIFIER")), "{reported:?}");
    // The test does not read now. The kernel buffers a few messages, and gpushd's queue has room
    // for a thousand more. gpushd drops all further messages.
    let begun = Instant::now();
    let mut rounds = 0;
    while rounds < 120 {
        work(&agent, 10);
        rounds += 10;
        assert!(begun.elapsed() < PATIENCE, "{rounds} rounds");
    }
    assert!(agent.get("/v1/health").status == 200);
    let reported = read_until(&journal, "log lines were dropped");
    println!("{rounds} rounds with a journal that is stopped; it then heard {} messages", reported.len());
    // From here on, there is no journald.
    drop(journal);
    fs::remove_file(&socket).expect("the socket is there");
    work(&agent, 2);
    agent.stop();
}

/// docs/install.md has commands that find journal entries by object. The commands need the fields
/// that this test checks.
#[test]
fn entries_name_their_objects_in_fields_for_journalctl() {
    if !can_mount("the fields of entries in the journal") {
        return;
    }
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n[[gpu]]\nmodel = \"l4\"\n");
    let directory = host.scratch("journal");
    fs::create_dir(&directory).expect("a directory");
    let journal = UnixDatagram::bind(directory.join("socket")).expect("a socket");
    let config = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = \"none\"\n\
                  [[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\n";
    let agent = start_with(&host, &directory, config);
    let uuid = agent.gpu(0).uuid.to_string();
    let uid = nix::unistd::geteuid().to_string();
    let value = |entry: &String, name: &str| field(entry, name).map(str::to_owned);

    assert_eq!(agent.post("/v1/gpus/0/cordon", &json!({ "reason": "a new fan" })).status, 200);
    let reported = read_until(&journal, "a new fan");
    let entry = reported.last().expect("the entry of the cordon");
    assert_eq!(
        (value(entry, "GPUSH_GPU"), value(entry, "GPUSH_UID")),
        (Some(uuid.clone()), Some(uid.clone())),
        "{entry:?}"
    );
    assert_eq!(agent.post("/v1/gpus/0/uncordon", &json!({})).status, 200);

    let operation = agent.apply_once(&["0"], &["7g.80gb"]);
    let reported = read_until(&journal, "begins: ");
    let entry = reported.last().expect("the entry of the operation");
    let fields = (value(entry, "GPUSH_OPERATION"), value(entry, "GPUSH_UID"));
    assert_eq!(fields, (Some(operation.id), Some(uid.clone())), "{entry:?}");

    let granted = agent.post("/v1/leases", &json!({ "share": { "kind": "whole" }, "selectors": ["1"] }));
    let lease = granted.json()["lease"]["id"].as_str().map(str::to_owned);
    let reported = read_until(&journal, " granted: ");
    let entry = reported.last().expect("the entry of the lease");
    assert!(lease.is_some(), "{}", granted.json());
    assert_eq!((value(entry, "GPUSH_LEASE"), value(entry, "GPUSH_UID")), (lease, Some(uid)), "{entry:?}");
    let granted = agent.post("/v1/leases", &json!({ "share": { "kind": "mig_profile", "profile": "7g.80gb" } })).json();
    let lease = granted["lease"]["id"].as_str().unwrap_or_else(|| panic!("{granted}"));
    let device = granted["lease"]["members"][0]["target"].as_str().map(str::to_owned);
    let reported = read_until(&journal, " granted: ");
    let entry = reported.last().expect("the entry of the lease");
    let fields = (value(entry, "GPUSH_GPU"), value(entry, "GPUSH_MIG"));
    assert_eq!(fields, (Some(uuid.clone()), device.clone()), "{entry:?}");
    assert_eq!(agent.post(&format!("/v1/leases/{lease}/release"), &json!({})).status, 200);
    let reported = read_until(&journal, " ended: ");
    let entry = reported.last().expect("the entry of the end");
    let user = nix::unistd::User::from_uid(nix::unistd::geteuid()).ok().flatten().expect("a user").name;
    let named = format!("lease {lease} of {user} on MIG device 0:7g.80gb@0 ended: released");
    assert!(entry.contains(&named), "{named}: {entry:?}");
    assert_eq!((value(entry, "GPUSH_GPU"), value(entry, "GPUSH_MIG")), (Some(uuid), device), "{entry:?}");

    let page = gpush_tests::page::document("install.md");
    for name in ["GPUSH_GPU", "GPUSH_MIG", "GPUSH_LEASE", "GPUSH_OPERATION", "GPUSH_UID", "GPUSH_MPS"] {
        assert!(page.contains(name), "docs/install.md does not explain {name}");
    }
    agent.stop();
}
