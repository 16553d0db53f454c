//! Runs the commands of documents, and checks that they print what the document shows.
//!
//! In a `console` block, each line that starts with `$ ` is a command. The lines below a command
//! are its output. A `…` within a line matches any text. A line that contains only `…` matches any
//! number of lines. All commands of a page run in one shell.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use gpush_tests::{
    agent::{PATIENCE, Setup, real_layout},
    host::{Host, program},
    page::{blocks, document},
};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the directory of the built programs.
fn programs() -> PathBuf {
    program("gpushctl").parent().expect("a program is somewhere").to_owned()
}

fn shell(script: &str, environment: &[(&str, String)]) -> Output {
    let mut command = Command::new("bash");
    let path = format!("{}:{}", programs().display(), std::env::var("PATH").unwrap_or_default());
    command.args(["-c", script]).current_dir(repository()).env("PATH", path).env("LANG", "C.UTF-8");
    command.env("COLUMNS", "80").env_remove("GPUSH_CONFIG").env_remove("XDG_RUNTIME_DIR");
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    command.stdin(Stdio::null()).output().expect("bash can be started")
}

/// Returns whether a line of output matches the line that the page shows.
fn is_like(shown: &str, real: &str) -> bool {
    let Some((before, after)) = shown.split_once('…') else { return shown == real };
    let Some(rest) = real.strip_prefix(before) else { return false };
    (0..=rest.len()).filter(|at| rest.is_char_boundary(*at)).any(|at| is_like(after, &rest[at..]))
}

/// Returns whether lines of output match the lines that the page shows. Several spaces count as one
/// space: the real text in place of a `…` may be longer, and then shifts the columns.
fn are_like(shown: &[&str], real: &[&str]) -> bool {
    let plain = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    match (shown.split_first(), real.split_first()) {
        (None, None) => true,
        (Some((&"…", rest)), _) => (0..=real.len()).any(|at| are_like(rest, &real[at..])),
        (Some((one, shown)), Some((other, real))) => is_like(&plain(one), &plain(other)) && are_like(shown, real),
        (Some(_), None) | (None, Some(_)) => false,
    }
}

#[test]
fn first_steps_page_matches_real_output() {
    typed("first-steps.md");
}

#[test]
fn mps_page_matches_real_output() {
    typed("mps.md");
}

#[test]
fn leases_page_matches_real_output() {
    typed("leases.md");
}

#[test]
fn usage_page_matches_real_output() {
    typed("usage.md");
}

/// Runs the commands of a page. The page uses a simulated host in `/tmp/gpus`.
fn typed(page: &str) {
    let page = document(page);
    let scratch = tempfile::tempdir().expect("a directory");
    let host = scratch.path().join("gpus");
    let mut steps: Vec<(String, Vec<String>)> = Vec::new();
    for block in blocks(&page, "console") {
        for line in block.lines() {
            match line.strip_prefix("$ ") {
                Some(command) => steps.push((command.to_owned(), Vec::new())),
                None => steps.last_mut().expect("a command before its output").1.push(line.to_owned()),
            }
        }
    }
    let here = |text: &str| text.replace("/tmp/gpus", &host.display().to_string());
    let mut script = String::new();
    for (at, (command, _)) in steps.iter().enumerate() {
        let command = here(command);
        script += &format!("{{ {}\n}} > {2}/{1}.out 2> {2}/{1}.err\n", command, at, scratch.path().display());
        if command.ends_with('&') {
            // A reader types the next command after gpushd has started. So wait until gpushd
            // answers.
            let seconds = PATIENCE.as_secs();
            script += &format!("timeout {seconds} sh -c 'until gpushctl version > /dev/null 2>&1; do :; done'\n");
        }
    }
    script += &format!("kill $(jobs -p) 2> /dev/null; gpush-sim down --force {} 2> /dev/null; true\n", host.display());
    let output = shell(&script, &[]);
    assert!(output.status.success(), "{script}\n{}", String::from_utf8_lossy(&output.stderr));

    let mut typed = String::new();
    let mut wrong = String::new();
    for (at, (command, shown)) in steps.iter().enumerate() {
        let printed =
            |ending: &str| std::fs::read_to_string(scratch.path().join(format!("{at}.{ending}"))).expect("the output");
        let (out, err) = (printed("out"), printed("err"));
        // gpushctl prints its progress on stderr. Progress looks different on a terminal, so the
        // page shows only errors.
        let real = if err.starts_with("error:") { out + &err } else { out };
        let real = real.replace(&host.display().to_string(), "/tmp/gpus");
        let (lines, shown): (Vec<&str>, Vec<&str>) =
            (real.lines().collect(), shown.iter().map(String::as_str).collect());
        if !are_like(&shown, &lines) {
            wrong += &format!("$ {command}\nis shown as\n{}\nand says\n{real}\n", shown.join("\n"));
        }
        typed += &format!("$ {command}\n{real}");
    }
    assert!(wrong.is_empty(), "{wrong}\nall that was typed:\n{typed}");
    println!("{} commands typed", steps.len());
    assert!(steps.len() > 10, "{}", steps.len());
}

const PARTED: &str = "version: v1\nmig-configs:\n  all-balanced:\n    - devices: [0, 1]\n      mig-enabled: true\n      \
                      mig-devices: {1g.10gb: 2, 2g.20gb: 1, 3g.40gb: 1}\n    - devices: [2]\n      mig-enabled: \
                      true\n      mig-devices: {7g.80gb: 1}\n";

#[test]
fn mig_parted_label_is_imported_as_the_page_says() {
    let page = document("migrating-from-mig-parted.md");
    let commands = blocks(&page, "sh").into_iter().find(|block| block.contains("mig import")).expect("the commands");
    assert_eq!(commands.lines().count(), 3, "{commands}");
    let host = Host::up("dgx-a100");
    let example = std::fs::read_to_string(repository().join("config.example.toml")).unwrap();
    let agent = Setup::on(&host).config(&example).start();
    let config = host.scratch("gpushd.toml");
    let parted = host.scratch("config.yaml");
    std::fs::write(&parted, PARTED).unwrap();
    let commands = commands
        .replace("/etc/gpush/config.toml", &config.display().to_string())
        .replace("import config.yaml", &format!("import {}", parted.display()))
        .replace("systemctl reload gpushd", "gpushctl config reload");
    let output = shell(&format!("set -e\n{commands}"), &[("GPUSH_SOCKET", agent.socket().display().to_string())]);
    let printed = [&output.stdout[..], &output.stderr].concat();
    assert!(output.status.success(), "{commands}\n{}", String::from_utf8_lossy(&printed));
    let wanted: Vec<Option<Vec<String>>> = agent.gpus().into_iter().take(4).map(|gpu| gpu.layout).collect();
    let mixed = Some(["1g.10gb*2", "2g.20gb", "3g.40gb"].map(str::to_owned).to_vec());
    assert_eq!(wanted, [mixed.clone(), mixed, Some(vec!["7g.80gb".to_owned()]), None]);
}

/// The unit and the commands in containers.md name a MIG device by its place. Another layout destroys the device, and a
/// later layout creates a device at this place again.
#[test]
fn unit_and_compose_file_get_the_present_device_of_a_place() {
    let page = document("containers.md");
    let unit = blocks(&page, "ini").pop().expect("a unit");
    let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=/usr/bin/")).expect("a command");
    let compose = blocks(&page, "sh").pop().expect("a command");
    assert!(
        blocks(&page, "yaml")[0].contains("[\"${CUDA_VISIBLE_DEVICES:?"),
        "the file needs a variable that `run` sets"
    );
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\nmig = true\n");
    let agent = Setup::on(&host).config("[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb*2\"]\n").start();
    agent.await_that("the layout is applied", || real_layout(&host, 0).len() == 2);
    let _begun = agent.settle();
    let environment = [("GPUSH_SOCKET", agent.socket().display().to_string())];
    let prints = |script: &str| {
        let output = shell(script, &environment);
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    let place = "0:3g.40gb@4";
    let uuid = || prints("gpushctl mig list --no-headers -o csv | grep '^0,3g.40gb@4,' | grep -o 'MIG-[^,]*'");
    let before = uuid();
    assert!(prints("gpushctl mig list -o name").lines().any(|name| name == place));
    for command in [start, compose.trim()] {
        let (run, _) = command.split_once(" -- ").expect("a command of `run`");
        assert_eq!(prints(&format!("{run} -- printenv CUDA_VISIBLE_DEVICES")), before, "{command}");
    }
    for layout in ["7g.80gb", "1g.10gb,3g.40gb@4"] {
        prints(&format!("gpushctl mig apply {layout} -g 0 --yes --wait"));
    }
    let (run, _) = start.split_once(" -- ").expect("a command of `run`");
    assert_eq!(prints(&format!("{run} -- printenv CUDA_VISIBLE_DEVICES")), uuid());
    for (command, says) in [("explain", "destroyed by op-"), ("audit --object", "mig.apply"), ("events", &*before)] {
        let object = if command == "events" { "" } else { &*before };
        let printed = prints(&format!("gpushctl {command} {object}"));
        assert!(printed.contains(says), "{command}: {printed}");
    }
}

#[test]
fn manual_install_puts_files_where_units_expect_them() {
    let page = document("install.md");
    let blocks = blocks(&page, "sh");
    let [_, _, install, enable, remove, _] = &blocks[..] else { panic!("{blocks:?}") };
    let scratch = tempfile::tempdir().unwrap();
    let (root, man) = (scratch.path().join("root"), scratch.path().join("man"));
    assert!(install.starts_with("ROOT=\n"), "{install}");
    let pages =
        shell(&format!("gpushctl man {0} && echo .TH | tee {0}/gpushd.8 > {0}/gpush-config.5", man.display()), &[]);
    assert!(pages.status.success(), "{}", String::from_utf8_lossy(&pages.stderr));
    let install_into = |root: &Path| {
        install
            .replacen("ROOT=", &format!("ROOT={}", root.display()), 1)
            .replace("target/release", &programs().display().to_string())
            .replace("target/man", &man.display().to_string())
    };
    let install = install_into(&root);
    // Install twice: the second installation must keep the config.
    let output = shell(&format!("set -e\n{install}echo '# mine' > $ROOT/etc/gpush/config.toml\n{install}"), &[]);
    assert!(output.status.success(), "{install}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(std::fs::read_to_string(root.join("etc/gpush/config.toml")).unwrap(), "# mine\n");
    for path in [
        "usr/sbin/gpushd",
        "usr/bin/gpushctl",
        "usr/share/gpush/slurm/prolog",
        "usr/share/man/man8/gpushd.8",
        "usr/share/man/man5/gpush-config.5",
        "usr/share/man/man1/gpushctl.1",
        "usr/share/doc/gpush/docs/config.md",
        "usr/share/doc/gpush/sim/mps-sim/README.md",
    ] {
        assert!(root.join(path).exists(), "{path}");
    }
    for entry in std::fs::read_dir(repository().join("systemd")).unwrap() {
        let unit = entry.unwrap().file_name().into_string().unwrap();
        assert!(root.join("usr/lib/systemd/system").join(&unit).exists(), "{unit}");
    }

    // The removal deletes each file of another installation.
    let removed = scratch.path().join("removed");
    let remove = remove.replace(" /", &format!(" {}/", removed.display()));
    let deletions: Vec<&str> =
        remove.split_inclusive('\n').filter(|line| line.starts_with("rm ") || line.starts_with(' ')).collect();
    let output = shell(&format!("set -e\n{}\n{}", install_into(&removed), deletions.concat()), &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let left = shell(&format!("find {} -type f -o -type l", removed.display()), &[]);
    assert_eq!(String::from_utf8_lossy(&left.stdout), "", "the removal leaves files");

    let there =
        |tool: &str| Command::new(tool).arg("--version").stdout(Stdio::null()).status().is_ok_and(|s| s.success());
    if !["systemctl", "systemd-sysusers"].into_iter().all(there) {
        println!("SKIPPED: systemd is not installed");
        return;
    }
    for line in enable.lines() {
        let tool = line.split(' ').next().unwrap_or_default();
        let line = match tool {
            "systemd-sysusers" => line.replacen(tool, &format!("{tool} --root={}", root.display()), 1),
            // With `--root`, systemctl cannot start units, so this command only enables them.
            // Below, the test checks which units are enabled.
            "systemctl" if line.contains("enable") => {
                line.replacen(tool, &format!("{tool} --root={}", root.display()), 1).replace("--now ", "")
            }
            "systemctl" | "systemd-tmpfiles" | "gpushctl" => continue,
            other => panic!("{other} is new to this test"),
        };
        let output = shell(&line, &[]);
        assert!(output.status.success(), "{line}\n{}", String::from_utf8_lossy(&output.stderr));
    }
    let group = std::fs::read_to_string(root.join("etc/group")).unwrap();
    assert!(group.lines().any(|line| line.starts_with("gpush:")), "{group}");
    for enabled in [
        "multi-user.target.wants/gpushd.service",
        "sockets.target.wants/gpushd.socket",
        "sockets.target.wants/gpushd-admin.socket",
    ] {
        let link = root.join("etc/systemd/system").join(enabled);
        assert!(link.symlink_metadata().is_ok(), "{} is not enabled", link.display());
    }
}
