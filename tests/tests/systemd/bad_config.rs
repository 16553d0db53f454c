//! A config that gpushd cannot use does not end the service, and takes nothing away from users.

use gpush_tests::machine::Machine;

/// The second GPU is shared through MPS.
const HOST: &str = "[[gpu]]\nmodel = \"a100-80\"\nmig = true\n\n[[gpu]]\nmodel = \"l4\"\n";

/// A config that also uses the simulated control daemon.
const VALID: &str = "[mps]\ncontrol = \"/var/lib/gpush-sim/bin/nvidia-cuda-mps-control\"\n\n\
                     [[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"2g.20gb\"]\n\n\
                     [[gpu]]\nmatch = [\"1\"]\nmode = \"mps\"\n";

const CONFIG: &str = "/etc/gpush/config.toml";

const COPY: &str = "/var/lib/gpush/config.last-valid.toml";

/// An error that the config can have after a downgrade.
const UNKNOWN_KEY: &str = "key_of_a_newer_version = 1\n";

/// Starts a machine whose gpushd has applied the layout and started the MPS daemon.
fn machine(what: &str) -> Option<Machine> {
    let machine = Machine::boot(what)?;
    machine.install();
    machine.simulated_host(HOST);
    machine.sh("chmod 1777 /var/lib/gpush-sim/proc");
    machine.write(CONFIG, VALID);
    machine.sh("systemctl start gpushd.service gpush-ready.service");
    Some(machine)
}

/// Returns the MIG instances, and the unit and pid of the MPS daemon.
fn shared(machine: &Machine) -> (String, String) {
    let unit = machine.sh("systemctl list-units --plain --no-legend 'gpushd-mps@*' | cut -d ' ' -f 1");
    let pid = machine.main_pid(&unit);
    (machine.sh("gpushctl mig list -o uuid"), format!("{unit} {pid}"))
}

/// Restarts gpushd. Checks that it serves and names the problem.
fn restart(machine: &Machine, problem: &str) {
    machine.sh("systemctl restart gpushd.service");
    let status = machine.sh("systemctl status --no-pager --lines=0 gpushd.service");
    assert!(status.contains(problem), "{problem}: {status}");
    assert!(machine.sh("gpushctl status 2>&1").contains(problem), "{problem}");
    assert_eq!(machine.property("gpushd.service", "NRestarts"), "0", "{problem}");
}

#[test]
fn service_without_a_usable_config_takes_nothing_away() {
    let Some(machine) = machine("configs that gpushd cannot use") else { return };
    reload_of_a_bad_config_fails_and_names_the_line(&machine);
    service_keeps_the_last_valid_config_whatever_is_wrong(&machine);
    service_without_a_usable_config_changes_nothing(&machine);
    layouts_of_a_boot_wait_for_a_usable_config(&machine);
}

fn reload_of_a_bad_config_fails_and_names_the_line(machine: &Machine) {
    machine.write(CONFIG, "[log]\nlevel = \"debug\"\n[mpz]\n");
    let reload = machine.run("gpushctl config reload 2>&1");
    let printed = String::from_utf8_lossy(&reload.stdout).into_owned();
    assert!(!reload.status.success() && printed.contains("line 3, column 2"), "{printed}");
    let status = machine.sh("systemctl status --no-pager --lines=0 gpushd.service");
    assert!(status.contains("was not loaded: line 3, column 2"), "{status}");
    machine.write(CONFIG, VALID);
    machine.sh("gpushctl config reload");
    let status = machine.sh("systemctl status --no-pager --lines=0 gpushd.service");
    assert!(!status.contains("line 3"), "{status}");
}

fn service_keeps_the_last_valid_config_whatever_is_wrong(machine: &Machine) {
    let before = shared(machine);
    for (make, problem) in [
        (format!("chmod 664 {CONFIG}"), "is not trusted"),
        (format!("chown nobody {CONFIG}"), "is not trusted"),
        ("chmod 775 /etc/gpush".to_owned(), "is not trusted"),
        (format!("rm {CONFIG} && mkdir {CONFIG}"), "it is not a regular file"),
        (format!("rm {CONFIG} && mkfifo {CONFIG}"), "it is not a regular file"),
        (format!("rm {CONFIG} && ln -s config.toml {CONFIG}"), "can't be read"),
        (format!("rm {CONFIG} && ln -s absent {CONFIG}"), "is a symbolic link to a missing file"),
        (format!("echo '{}' > {CONFIG}", UNKNOWN_KEY.trim()), "line 1, column 1"),
    ] {
        machine.sh(&make);
        restart(machine, problem);
        assert!(machine.sh("gpushctl config show 2>&1").contains("3g.40gb"), "{problem}");
        assert_eq!(shared(machine), before, "{problem}");
        machine.sh(&format!("rm -rf {CONFIG}; chmod 755 /etc/gpush"));
        machine.write(CONFIG, VALID);
        machine.sh("gpushctl config reload");
    }
}

fn service_without_a_usable_config_changes_nothing(machine: &Machine) {
    let before = shared(machine);
    for damage in [format!("echo '{}' > {COPY}", UNKNOWN_KEY.trim()), format!("rm {COPY}"), format!("echo -n > {COPY}")]
    {
        machine.write(CONFIG, UNKNOWN_KEY);
        machine.sh(&damage);
        // The second restart must not treat an empty config as the last valid one.
        for _ in 0..2 {
            restart(machine, "`gpushctl config check");
            machine.await_that("both GPUs are held", |machine| {
                machine.sh("gpushctl status").matches("! held: gpushd can't use its config").count() == 2
            });
            assert_eq!(shared(machine), before, "{damage}");
            let refused = machine.run("gpushctl mig apply --gpu 0 --layout 7g.80gb --yes");
            assert_eq!(refused.status.code(), Some(4), "{refused:?}");
        }
        machine.write(CONFIG, VALID);
        machine.sh("systemctl reload gpushd.service");
        machine.await_that("no GPU is held", |machine| !machine.sh("gpushctl status").contains("held"));
        machine.sh("gpushctl ready --timeout 30s");
        assert_eq!(shared(machine), before, "{damage}");
    }
}

/// A boot without a usable config must not count as a boot whose layouts are applied.
fn layouts_of_a_boot_wait_for_a_usable_config(machine: &Machine) {
    let rules = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"2g.20gb\"]\n";
    machine.write(CONFIG, rules);
    machine.sh("gpushctl config reload && systemctl stop gpushd.service 'gpushd-mps@*'");
    machine.sh(&format!("/opt/built/gpush-sim reboot /var/lib/gpush-sim && rm {COPY}"));
    machine.write(CONFIG, UNKNOWN_KEY);
    restart(machine, "`gpushctl config check");
    machine.await_that("GPU 0 is held", |machine| machine.sh("gpushctl status").contains("held"));
    assert_eq!(machine.sh("gpushctl mig list -o uuid"), "");
    machine.write(CONFIG, rules);
    machine.sh("gpushctl config reload && gpushctl ready --timeout 30s");
    assert_eq!(machine.sh("gpushctl mig list -o uuid").lines().count(), 2);
}
