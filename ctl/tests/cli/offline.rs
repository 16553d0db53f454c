//! Tests of commands that need no gpushd: usage errors, offline plans, config checks, completions and man pages. They
//! check stdout, stderr and the exit status.

use gpush_api::{ComputeInstance, GpuInstance, Memory, Placement, Process, ProcessKind};
use insta::assert_snapshot;

use crate::support::Host;

/// Saves a host with one A100, which has two instances: an idle 2g.20gb at 0, and a busy 3g.40gb at 4.
fn saved(host: &Host) -> String {
    let mut gpus = gpush_core::preset::gpus("dgx-a100").unwrap();
    gpus.truncate(1);
    let mig = gpus[0].mig.as_mut().unwrap();
    let process = Process {
        pid: Some(4123),
        uid: Some(1000),
        user: Some("alice".into()),
        command: Some("python train.py".into()),
        kind: ProcessKind::Compute,
        memory_mib: Some(12_400),
        unidentified: false,
    };
    for (id, profile, start, size, users) in [(3, "2g.20gb", 0, 2, vec![]), (2, "3g.40gb", 4, 4, vec![process])] {
        let of = mig.profiles.iter().find(|p| p.name == profile).unwrap();
        let whole = of.compute.iter().find(|c| c.name == profile).unwrap();
        mig.instances.push(GpuInstance {
            id,
            profile_id: of.id,
            profile: profile.into(),
            placement: Placement { start, size },
            memory: Some(Memory { total_mib: of.memory_mib, used_mib: 12 }),
            compute: vec![ComputeInstance {
                id: 0,
                profile_id: whole.id,
                profile: profile.into(),
                placement: Some(Placement { start: 0, size: of.slices }),
                uuid: Some(format!("MIG-0000000{id}-0000-0000-0000-000000000000").into()),
                processes: users,
            }],
            processes: Vec::new(),
        });
    }
    host.write("host.json", serde_json::to_vec(&gpus).unwrap());
    "host.json".to_owned()
}

const CONFIG: &str = r#"
[layouts]
mixed = ["3g.40gb", "2g.20gb", "1g.10gb*2"]

[[gpu]]
name = "training"
match = ["0"]
mode = "mig"
layout = "mixed"
"#;

#[test]
fn usage() {
    let host = Host::new();
    let cases: &[&[&str]] = &[
        &["statsu"],
        &["mig", "apply", "--wait=soon"],
        &["mig", "apply", "--timeout", "0"],
        &["mig", "apply", "--detach", "--timeout", "3s"],
        &["events", "--kind", "weather"],
        &["audit", "--since", "someday"],
        &["mig", "apply", "--timeout", "-1"],
        &["mig", "apply", "mixed", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--config", "x.toml"],
        &["gpu", "list", "--color", "blue"],
        &["--json", "gpu"],
        &["--json", "mig", "apply", "--dry-run", "--config", "x"],
        &["mig", "apply", "--wait", "30"],
        &["mig", "apply", "--dry-run", "0"],
        &["mig", "apply", "--dry-run", "nope", "--offline", "a30x4", "--config", "/dev/null"],
        &["completions", "tcsh"],
        &["mig", "-lgip"],
        &["mig", "apply", "-f", "x.yaml"],
        &["mig", "apply", "19,19"],
        &["mig", "apply", "7x1g.10gb", "--json"],
        &["gpu", "cordon", "0", "-o", "csv"],
        &["mps", "env"],
        &["status", "--watch", "2"],
        &["status", "-w"],
        &["top", "--interval", "0.5"],
        &["gpu", "reset", "0", "--detach"],
        &["-pm", "1"],
        &["--version"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));
}

#[test]
fn plans_for_presets_and_saved_hosts() {
    let host = Host::new();
    let saved = saved(&host);
    host.write("config.toml", CONFIG);
    let cases: &[&[&str]] = &[
        &["mig", "profiles", "--offline", "a30x4"],
        &["mig", "profiles", "--offline", "mixed", "--gpu", "4"],
        &["mig", "apply", "--dry-run", "--offline", "a30x4", "--gpu", "0-1", "--layout", "2g.12gb,1g.6gb*2"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--gpu", "0", "--layout", "1c.3g.40gb*3,1g.10gb+me"],
        &["mig", "apply", "--dry-run", "--offline", &saved, "--config", "config.toml"],
        &["mig", "apply", "--dry-run", "--offline", &saved, "--config", "config.toml", "--gpu", "*A100*", "mixed"],
        &["mig", "apply", "--dry-run", "--offline", &saved, "--gpu", "0", "--layout", "2g.20gb@0,3g.40gb@4"],
        &["mig", "apply", "--dry-run", "--offline", &saved, "--gpu", "0", "--layout", "none"],
        &["mig", "apply", "--dry-run", "--offline", &saved, "--gpu", "0", "--layout", "7g.80gb"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));
}

#[test]
fn impossible_plans_are_refused() {
    let host = Host::new();
    let saved = saved(&host);
    host.write("notes.txt", "just some text");
    host.write("latin1.json", b"[\xe9]");
    let cases: &[&[&str]] = &[
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--gpu", "0", "--layout", "3g.48gb"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--gpu", "0", "--layout", "4g.40gb*2"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--gpu", "0", "--layout", "1g.10gb*8"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--gpu", "0", "--layout", ""],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--gpu", "0", "--layout", "3g.40gb,,"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--gpu", "9", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--gpu", "5-2", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--gpu", "?!", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--offline", "mixed", "--gpu", "4", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a1000", "--gpu", "0", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--offline", "gone.json", "--gpu", "0", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--offline", "notes.txt", "--gpu", "0", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--offline", "latin1.json", "--gpu", "0", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--offline", "/", "--gpu", "0", "--layout", "3g.40gb"],
        &["mig", "apply", "--dry-run", "--offline", &saved, "--config", "gone.toml"],
        &["--json", "mig", "apply", "--dry-run", "--offline", "dgx-a100", "--gpu", "9", "--layout", "3g.40gb"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));
}

/// If a user adds the flags in a hint to the command, the command must print a plan.
#[test]
fn hints_of_offline_plans_work_as_typed() {
    let host = Host::new();
    host.write("empty.toml", "");
    let saved = saved(&host);
    let config = ["--config", "empty.toml"];
    let mut tried = 0;
    for offline in ["dgx-a100", "mixed", "rtx-pro-6000x2", &saved] {
        let layout = if offline.starts_with("rtx") { "2g.48gb" } else { "none" };
        for typed in [&[][..], &config, &["--layout", layout], &["--layout", layout, "--config", "empty.toml"]] {
            let args = [&["--json", "mig", "apply", "--dry-run", "--offline", offline][..], typed].concat();
            let run = |args: &[&str]| -> (Option<i32>, serde_json::Value) {
                let output = host.command(args).output().unwrap();
                (output.status.code(), serde_json::from_slice(&output.stdout).unwrap())
            };
            let (code, answer) = run(&args);
            assert_eq!(code, Some(2), "{args:?}: {answer}");
            let hint = answer["error"]["hint"].as_str().unwrap();
            assert!(!hint.contains("gpushctl mig apply") && !hint.contains("reload"), "{hint}");
            let flags: Vec<&str> = hint.rsplit(": ").next().unwrap().split(' ').collect();
            let (code, answer) = run(&[&args[..], &flags].concat());
            // Exit status 4 is correct too: a GPU of the saved host is in use.
            assert!(code == Some(0) || code == Some(4), "{hint}: {answer}");
            tried += 1;
        }
    }
    println!("{tried} hints");
}

#[test]
fn label_for_all_gpus_names_gpus_without_mig() {
    let host = Host::new();
    let on = "version: v1\nmig-configs:\n  on:\n    - devices: all\n      mig-enabled: true\n      mig-devices: {}\n";
    host.write("on.yaml", on);
    let cases: &[&[&str]] = &[
        &["mig", "apply", "--dry-run", "--offline", "mixed", "--file", "on.yaml"],
        &["mig", "apply", "--check", "--offline", "mixed", "--file", "on.yaml"],
        &["mig", "apply", "--dry-run", "--offline", "mixed", "--file", "on.yaml", "--gpu", "5"],
        &["mig", "import", "on.yaml", "-c", "on"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));
}

#[test]
fn saved_host_on_stdin_gives_a_json_plan() {
    let host = Host::new();
    let saved = std::fs::read(host.path(&saved(&host))).unwrap();
    let args = ["mig", "apply", "--dry-run", "--offline", "-", "--gpu", "0", "--layout", "3g.40gb,1g.10gb@0", "--json"];
    assert_snapshot!(host.run_with(&args, &saved));
}

#[test]
fn asserting_a_layout() {
    let host = Host::new();
    let saved = saved(&host);
    let cases: &[&[&str]] = &[
        &["mig", "apply", "--check", "--offline", &saved, "--gpu", "0", "--layout", "2g.20gb,3g.40gb"],
        &["mig", "apply", "--check", "--offline", &saved, "--gpu", "0", "--layout", "3g.40gb"],
        &["mig", "apply", "--check", "--offline", &saved, "--gpu", "0", "--layout", "7g.80gb"],
        &["mig", "apply", "--check", "--offline", &saved, "--gpu", "0", "--layout", "9g.99gb"],
        &["mig", "apply", "--check", "--offline", "mixed", "--gpu", "5", "--layout", "1g.10gb"],
        // The rule forbids a change of this GPU, but a check must still work.
        &["mig", "apply", "--check", "--offline", "mixed", "--gpu", "0", "--config", "unmanaged.toml"],
    ];
    host.write("unmanaged.toml", "[[gpu]]\nmatch = [\"0\"]\nmode = \"unmanaged\"\n");
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));
}

const PARTED: &str = r#"
version: v1
mig-configs:
  all-disabled:
    - devices: all
      mig-enabled: false
  balanced:
    - device-filter: ["0x20B210DE"]
      devices: [0, 1]
      mig-enabled: true
      mig-devices:
        "1g.10gb": 2
        "2g.20gb": 1
        "3g.40gb": 1
    - device-filter: ["0x20B210DE"]
      devices: [2, 3]
      mig-enabled: true
      mig-devices: {}
"#;

#[test]
fn labels_of_mig_parted_files() {
    let host = Host::new();
    let saved = saved(&host);
    host.write("parted.yaml", PARTED);
    host.write("wrong.yaml", PARTED.replace("mig-enabled: true", "mig-enable: true"));
    let typo = "  typo:\n    - devices: all\n      mig-enabled: true\n      mig-devices: {1g10gb: 7}\n";
    host.write("partly.yaml", PARTED.to_owned() + typo);
    host.write("one.yaml", "version: v1\nmig-configs:\n  x:\n    - devices: all\n      mig-enabled: true\n      mig-devices: {3g.40gb: 1, 2g.20gb: 1}\n");
    host.write("large.yaml", "#".repeat(2 << 20));
    let cases: &[&[&str]] = &[
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--file", "parted.yaml", "-c", "balanced"],
        &[
            "mig",
            "apply",
            "--dry-run",
            "--offline",
            "dgx-a100",
            "--file",
            "parted.yaml",
            "-c",
            "balanced",
            "--gpu",
            "1",
        ],
        &[
            "mig",
            "apply",
            "--dry-run",
            "--offline",
            "dgx-a100",
            "--file",
            "parted.yaml",
            "-c",
            "balanced",
            "--gpu",
            "4",
        ],
        &["mig", "apply", "--check", "--offline", &saved, "--file", "one.yaml"],
        &[
            "mig",
            "apply",
            "--check",
            "--offline",
            "dgx-h100",
            "--file",
            "parted.yaml",
            "-c",
            "all-disabled",
            "--gpu",
            "0",
        ],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--file", "parted.yaml"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--file", "parted.yaml", "-c", "balancd"],
        &["mig", "apply", "--dry-run", "--offline", "a30x4", "--file", "parted.yaml", "-c", "balanced"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--file", "wrong.yaml"],
        &["mig", "apply", "--file", "gone.yaml"],
        &["mig", "apply", "--file", "."],
        &["mig", "apply", "--file", "/dev/zero"],
        &["mig", "apply", "--file", "large.yaml"],
        &["mig", "apply", "--file", "parted.yaml", "--layout", "1g.10gb"],
        &["mig", "apply", "mixed", "-c", "balanced"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--file", "parted.yaml", "-c", "x", "--json"],
        &["mig", "import", "parted.yaml"],
        &["mig", "import", "parted.yaml", "-c", "balanced"],
        &["mig", "import", "parted.yaml", "-c", "balanced", "--json"],
        &["mig", "import", "wrong.yaml", "--json"],
        &["mig", "import", "partly.yaml"],
        &["mig", "import", "partly.yaml", "--json"],
        &["mig", "import", "partly.yaml", "-c", "balanced"],
        &["mig", "import", "partly.yaml", "-c", "typo"],
        &["mig", "apply", "--dry-run", "--offline", "dgx-a100", "--file", "partly.yaml", "-c", "balanced"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));
    let piped = host.run_with(&["mig", "import", "-", "-c", "balanced"], PARTED.as_bytes());
    assert!(piped.contains("from the mig-parted file stdin, label balanced"), "{piped}");
}

#[test]
fn checking_a_config() {
    let host = Host::new();
    saved(&host);
    host.write("config.toml", CONFIG);
    host.write(
        "wrong.toml",
        "[driver]\nlibary = \"x\"\n\n[[gpu]]\nmatch = [\"0-\"]\nmode = \"mig\"\nlayout = [\"3g40gb\"]\n",
    );
    host.write("misfit.toml", CONFIG.replace("1g.10gb*2", "1g.10gb*3").replace("[\"0\"]", "[\"0\", \"*A30*\"]"));
    host.write("latin1.toml", b"# caf\xe9\n");
    host.write("empty.toml", "");
    let cases: &[&[&str]] = &[
        &["config", "check", "config.toml"],
        &["config", "check", "config.toml", "--offline", "dgx-a100"],
        &["config", "check", "config.toml", "--offline", "host.json"],
        &["config", "check", "misfit.toml", "--offline", "mixed"],
        &["config", "check", "wrong.toml"],
        &["config", "check", "wrong.toml", "--json"],
        &["config", "check", "latin1.toml"],
        &["config", "check", "empty.toml"],
        &["config", "check", "empty.toml", "--offline", "a30x4"],
        &["config", "check", "gone.toml"],
        &["config", "check", ".", "--offline", "dgx-a100"],
        &["config", "check", "-", "--offline", "-"],
    ];
    let text: Vec<_> = cases.iter().map(|args| host.run(args)).collect();
    assert_snapshot!(text.join("\n"));

    let good = host.command(&["config", "check", "config.toml", "--offline", "dgx-a100", "--json"]).output().unwrap();
    let document: serde_json::Value = serde_json::from_slice(&good.stdout).unwrap();
    assert_eq!(document["config"]["rules"][0]["claims"], serde_json::json!([0]));
    assert_eq!(document["plans"][0]["layout"], serde_json::json!(["3g.40gb", "2g.20gb", "1g.10gb*2"]));

    let named = host.command(&["config", "check"]).env("GPUSH_CONFIG", "config.toml").output().unwrap();
    assert!(String::from_utf8_lossy(&named.stdout).starts_with("config.toml: no errors"), "{named:?}");
}

#[test]
fn pipe_without_a_writer_is_refused() {
    let host = Host::new();
    let pipe = host.path("pipe");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR).unwrap();
    // Open the pipe after 20 s. So if gpushctl waits for a writer, the test fails and does not hang.
    let (ended, limit) = std::sync::mpsc::channel::<()>();
    let late = pipe.clone();
    let rescue = std::thread::spawn(move || {
        if limit.recv_timeout(std::time::Duration::from_secs(20)).is_err() {
            drop(std::fs::OpenOptions::new().write(true).open(late));
        }
    });
    let text = host.run(&["config", "check", "pipe"]);
    ended.send(()).unwrap();
    rescue.join().unwrap();
    assert!(text.contains("can't read pipe") && text.contains("a pipe without a writer"), "{text}");
    assert!(text.ends_with("[exit 1]\n"), "{text}");

    // If a pipe has a writer, gpushctl must read until the writer closes the pipe. Here, the pipe is stdin, and the
    // test writes to it while gpushctl runs.
    let text = host.run_with(&["config", "check", "/dev/stdin"], CONFIG.as_bytes());
    assert!(text.contains("/dev/stdin: no errors"), "{text}");
}

#[test]
fn example_config_is_valid() {
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../config.example.toml");
    let host = Host::new();
    let output = host.command(&["config", "check", example, "--offline", "dgx-a100"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn completion_script_of_each_shell_calls_gpushctl() {
    let host = Host::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = host.command(&["completions", shell]).output().unwrap();
        let script = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && output.stderr.is_empty());
        assert!(script.contains("COMPLETE") && script.contains("gpushctl"), "{shell}: {script}");
    }
}

/// Without gpushd, completion must offer the words that gpushctl itself knows, and must not wait for gpushd.
#[test]
fn completion_without_gpushd_offers_static_words() {
    let host = Host::new();
    for (line, expected) in [
        ("gpushctl st", "status"),
        ("gpushctl mig prof", "profiles"),
        ("gpushctl -o u", "uuid"),
        ("gpushctl events --kind x", "xid"),
        ("gpushctl doctor --only driver,con", "driver,config"),
        ("gpushctl mig profiles --offline dgx-h1", "dgx-h100"),
        ("gpushctl lease env -o fi", "fish"),
        ("gpushctl mig apply --dry-run no", "none"),
        ("gpushctl gpu drain --rea", "--reason"),
        // Here, only hidden names match, and completion must not offer them.
        ("gpushctl man", ""),
        ("gpushctl gpus", ""),
        ("gpushctl -o fi", ""),
        ("gpushctl mps logs --li", ""),
        // Here, only gpushd knows the words.
        ("gpushctl gpu show 0", ""),
        ("gpushctl lease show L", ""),
    ] {
        assert_eq!(completions(&host, line), expected.lines().collect::<Vec<_>>(), "{line}");
    }
}

/// Tries to complete every word of every command. Completion must not offer hidden commands, options or values.
#[test]
fn completion_offers_no_hidden_words() {
    let host = Host::new();
    let hidden = [
        "man",
        "ready",
        "recover",
        "completions",
        "prolog",
        "ls",
        "gpus",
        "leases",
        "rm",
        "--lines",
        "sh",
        "csh",
        "docker",
        "\u{1}",
    ];
    for line in [
        "gpushctl ",
        "gpushctl -o ",
        "gpushctl mig ",
        "gpushctl mps logs -",
        "gpushctl status -o ",
        "gpushctl help ",
        "gpushctl slurm ",
    ] {
        let offered = completions(&host, line);
        assert!(!offered.is_empty(), "{line}");
        assert!(!offered.iter().any(|word| hidden.contains(&word.as_str())), "{line}: {offered:?}");
    }
}

/// Returns the words that completion offers for the last word of a line, in the way in which fish asks.
fn completions(host: &Host, line: &str) -> Vec<String> {
    let words = ["--"].into_iter().chain(line.split(' ')).collect::<Vec<_>>();
    let output = host.command(&words).env("COMPLETE", "fish").output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{line}: {output:?}");
    let lines = String::from_utf8(output.stdout).unwrap();
    lines.lines().map(|line| line.split('\t').next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn man_pages_of_every_command() {
    let host = Host::new();
    let output = host.command(&["man", "pages"]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut pages: Vec<_> = std::fs::read_dir(host.path("pages"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    pages.sort();
    assert_snapshot!(pages.join("\n"));
    let apply = std::fs::read_to_string(host.path("pages/gpushctl-mig-apply.1")).unwrap();
    assert!(apply.contains("gpushctl mig apply") && apply.contains("instances in use are never destroyed"), "{apply}");

    host.write("file", "");
    assert_snapshot!(host.run(&["man", "file"]), @r"
    $ gpushctl man file
    [stderr]
    error: can't make the directory file
      cause: File exists (os error 17)
    [exit 1]
    ");
}

#[test]
fn missing_groups_are_a_warning() {
    let host = Host::new();
    let groups = "[access]\nadmin_groups = [\"root\", \"no-such-group\"]\n";
    host.write("config.toml", groups);
    assert_snapshot!(host.run(&["config", "check", "config.toml"]));
    let text = host.run(&["config", "check", "config.toml", "--json"]);
    assert!(text.contains("no-such-group") && text.ends_with("[exit 0]\n"), "{text}");
}
