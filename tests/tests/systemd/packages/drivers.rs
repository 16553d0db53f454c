//! `apt install ./gpush_*.deb` on hosts with every kind of driver, and with none. apt must not touch the driver.
//!
//! The drivers are stand-ins: packages with the names, relations and scripts that matter. A repository offers them all,
//! so that apt could install them.

use gpush_tests::machine::Machine;

/// The driver of a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Driver {
    None,
    /// Debian's packages of the driver, complete.
    Packaged,
    /// Only Ubuntu's package with nvidia-smi.
    OnlyUtils,
    /// Installed with NVIDIA's installer. No package knows the files.
    Runfile,
}

/// A stand-in package.
struct StandIn {
    name: &'static str,
    /// More fields of the control file.
    fields: &'static str,
    /// A maintainer script: its name, and its text.
    script: Option<(&'static str, &'static str)>,
}

const fn stand_in(name: &'static str, fields: &'static str) -> StandIn {
    StandIn { name, fields, script: None }
}

/// The package that the rule "recommends" used to pull in: its service fails without a driver, and its dependency
/// uninstalls a driver that NVIDIA's installer has installed.
const STAND_INS: [StandIn; 6] = [
    StandIn {
        script: Some((
            "postinst",
            "printf '[Service]\\nExecStart=/usr/bin/nvidia-smi --persist\\n' > /etc/systemd/system/nvidia-persistenced.service
             systemctl daemon-reload; systemctl start nvidia-persistenced.service || true",
        )),
        ..stand_in("nvidia-persistenced", "Depends: nvidia-installer-cleanup\n")
    },
    StandIn {
        script: Some(("preinst", "rm -f /usr/bin/nvidia-smi /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")),
        ..stand_in("nvidia-installer-cleanup", "")
    },
    stand_in("nvidia-driver", "Recommends: nvidia-persistenced\n"),
    stand_in("nvidia-utils-580-server", "Provides: nvidia-utils\nConflicts: nvidia-utils\n"),
    stand_in("nvidia-utils-570", "Provides: nvidia-utils\nConflicts: nvidia-utils\n"),
    stand_in("nvidia-compute-utils-570", "Provides: nvidia-persistenced\nDepends: nvidia-utils-570\n"),
];

/// Builds the stand-ins in `/srv/repository`, and makes this directory the only source of apt.
fn offer_stand_ins(machine: &Machine) {
    let control = "Version: 1\nArchitecture: all\nMaintainer: test <test@localhost>\nDescription: a stand-in\n";
    for StandIn { name, fields, script } in STAND_INS {
        let tree = format!("/srv/tree/{name}/DEBIAN");
        machine.write(&format!("{tree}/control"), format!("Package: {name}\n{control}{fields}"));
        if let Some((script, text)) = script {
            machine.put(&format!("{tree}/{script}"), format!("#!/bin/sh\n{text}\n"));
        }
    }
    machine.sh(
        "mkdir /srv/repository && cd /srv/tree && for name in *; do
             dpkg-deb --build $name /srv/repository/$name.deb >/dev/null
         done
         cd /srv/repository && for file in *.deb; do
             dpkg-deb --field $file
             printf 'Filename: ./%s\\nSize: %s\\nSHA256: %s\\n\\n' $file $(stat -c %s $file) $(sha256sum < $file | cut -d' ' -f1)
         done > Packages",
    );
    machine.write("/etc/apt/sources.list", "deb [trusted=yes] file:/srv/repository ./\n");
    machine.sh("rm -rf /etc/apt/sources.list.d/* && apt-get -q update 2>&1");
}

/// Gives the host its driver.
fn install_driver(machine: &Machine, driver: Driver) {
    let runfile = "printf '#!/bin/sh\\nexec sleep 1000\\n' > /usr/bin/nvidia-smi && chmod 755 /usr/bin/nvidia-smi && \
                   echo library > /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1";
    let install = |packages: &str| format!("DEBIAN_FRONTEND=noninteractive apt-get -q install --yes {packages} 2>&1");
    match driver {
        Driver::None => {}
        Driver::Packaged => {
            machine.sh(&install("nvidia-driver"));
            machine.sh(runfile);
            machine.sh("systemctl reset-failed && systemctl start nvidia-persistenced.service");
        }
        Driver::OnlyUtils => drop(machine.sh(&install("--no-install-recommends nvidia-utils-580-server"))),
        Driver::Runfile => drop(machine.sh(runfile)),
    }
}

/// Returns everything that the installation must leave as it is: the packages, the active services, the failed units,
/// and the files of a driver.
fn state(machine: &Machine) -> [String; 4] {
    [
        "dpkg-query --show --showformat='${db:Status-Abbrev} ${Package} ${Version}\\n' | grep -v ' gpush '",
        "systemctl list-units --plain --no-legend --type=service,socket --state=active | cut -d' ' -f1 | grep -v ^gpush",
        "systemctl --failed --plain --no-legend; systemctl is-system-running || true",
        "cksum /usr/bin/nvidia-smi /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1 2>&1; true",
    ]
    .map(|line| machine.sh(line))
}

/// Checks that an installation of gpush changes nothing else on a host with this driver.
fn check(machine: &Machine, driver: Driver) {
    install_driver(machine, driver);
    let before = state(machine);
    let recommending = simulate_with_recommendation(machine);
    assert!(recommending.contains("Inst nvidia") == (driver != Driver::Packaged), "{driver:?}: {recommending}");

    // An interactive apt asks for confirmation only if it would change other packages. Here, the answer is the end of
    // the input.
    for install in [
        "script --quiet --return --command 'apt install ./gpush_*.deb' /dev/null </dev/null",
        "DEBIAN_FRONTEND=noninteractive apt install -y ./gpush_*.deb </dev/null",
    ] {
        let printed = machine.sh(&format!("cd /srv/new && {install} 2>&1"));
        assert!(!printed.contains("[Y/n]"), "{driver:?}: {install}: {printed}");
        assert_eq!(machine.sh("dpkg-query --show --showformat='${Status}' gpush"), "install ok installed", "{printed}");
        assert_eq!(state(machine), before, "{driver:?}: {install}: {printed}");
        assert_eq!(machine.sh("systemctl is-active gpushd.service"), "active", "{driver:?}: {install}");
        machine.sh("DEBIAN_FRONTEND=noninteractive apt-get purge --yes gpush 2>&1");
    }
}

/// Returns what apt would do if the package recommended nvidia-persistenced. This shows that the stand-ins react.
fn simulate_with_recommendation(machine: &Machine) -> String {
    machine.sh("dpkg-deb --raw-extract /srv/new/gpush_*.deb /srv/changed && cd /srv && \
         sed -i '/^Depends:/a Recommends: nvidia-persistenced' changed/DEBIAN/control && \
         dpkg-deb -Znone --build changed changed.deb >/dev/null && rm -r changed && \
         apt-get install --simulate --yes ./changed.deb 2>&1")
}

/// Removes what [`install_driver`] has installed.
fn remove_driver(machine: &Machine) {
    machine.sh("DEBIAN_FRONTEND=noninteractive apt-get -q purge --yes 'nvidia-*' 2>&1");
    machine.sh("rm -f /usr/bin/nvidia-smi /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
}

#[test]
fn apt_changes_nothing_but_gpush_whatever_the_driver() {
    let Some(machine) = Machine::boot("apt on hosts with and without drivers") else { return };
    let Some(file) = machine.package("gpush_VERSION-1_amd64.deb", None) else { return };
    offer_stand_ins(&machine);
    machine.sh(&format!("mkdir /srv/new && cp {file} /srv/new"));
    for driver in [Driver::None, Driver::OnlyUtils, Driver::Runfile, Driver::Packaged] {
        println!("a host with driver {driver:?}");
        check(&machine, driver);
        remove_driver(&machine);
    }
}
