//! Unattended upgrades, and the config: no package contains `/etc/gpush/config.toml`, so dpkg never asks about it.

use gpush_tests::machine::Machine;

use super::{CONFIG, LATER};

const FILE: &str = "gpush_VERSION-1_amd64.deb";

/// The config that an administrator wrote.
const EDITED: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n";

/// Installs a package file as an unattended upgrade does. dpkg could not ask a question.
fn unattended(machine: &Machine, file: &str) -> String {
    let printed =
        machine.sh(&format!("DEBIAN_FRONTEND=noninteractive apt-get -q install --yes {file} </dev/null 2>&1"));
    assert_eq!(machine.sh("dpkg-query --show --showformat='${Status}' gpush"), "install ok installed", "{printed}");
    assert_eq!(machine.sh("ls /etc/gpush"), "config.toml", "{printed}");
    printed
}

/// Builds a package like those before the config was created by a script: the reference is a conffile, and differs from
/// the present reference in one comment.
fn package_with_conffile(machine: &Machine, file: &str) -> String {
    machine.sh(&format!(
        "dpkg-deb --raw-extract {file} /srv/old && cd /srv/old && mkdir -p etc/gpush && \
         {{ cat usr/share/doc/gpush/examples/config.toml; echo '# An older comment'; }} > etc/gpush/config.toml && \
         echo {CONFIG} >> DEBIAN/conffiles && sed -i 's/^Version: .*/Version: 0.0.1-1/' DEBIAN/control && \
         dpkg-deb -Znone --build /srv/old /srv/old.deb >/dev/null"
    ));
    "/srv/old.deb".to_owned()
}

#[test]
fn config_survives_upgrades_and_removals() {
    let Some(machine) = Machine::boot("the config over upgrades") else { return };
    let (Some(first), Some(later)) = (machine.package(FILE, None), machine.package(FILE, Some(LATER))) else { return };
    config_is_created_once_and_belongs_to_the_administrator(&machine, &first, &later);
    config_of_an_older_package_survives_the_upgrade(&machine, &first);
}

fn config_is_created_once_and_belongs_to_the_administrator(machine: &Machine, first: &str, later: &str) {
    unattended(machine, first);
    assert_eq!(machine.sh(&format!("stat -c '%a %U' {CONFIG}")), "644 root");
    assert_eq!(machine.sh(&format!("grep -cv '^#' {CONFIG}; true")), "0", "the config has only a comment");
    // The file that the comment names has all settings.
    let reference = machine.sh(&format!("grep -o '/usr/share/doc/[a-z/.]*[a-z]' {CONFIG}"));
    assert!(machine.sh(&format!("grep -c '^#' {reference}")).parse::<u32>().is_ok_and(|lines| lines > 100));
    assert!(!machine.sh("dpkg-query --show --showformat='${Conffiles}' gpush").contains(CONFIG));

    machine.write(CONFIG, EDITED);
    unattended(machine, later);
    assert_eq!(machine.sh(&format!("cat {CONFIG}")), EDITED.trim_end());
    machine.sh("apt-get -q remove --yes gpush 2>&1");
    assert_eq!(machine.sh(&format!("cat {CONFIG}")), EDITED.trim_end(), "a removal keeps the config");
    // A removal masks no unit, so gpush can be installed in another way.
    assert_eq!(machine.sh("systemctl list-unit-files --state=masked --no-legend 'gpush*'; true"), "");
    unattended(machine, later);
    assert_eq!(machine.sh(&format!("cat {CONFIG}")), EDITED.trim_end());
    machine.sh("apt-get -q purge --yes gpush 2>&1");
    assert!(!machine.run("test -e /etc/gpush").status.success());
}

fn config_of_an_older_package_survives_the_upgrade(machine: &Machine, file: &str) {
    let old = package_with_conffile(machine, file);
    for is_edited in [true, false] {
        unattended(machine, &old);
        assert!(machine.sh("dpkg-query --show --showformat='${Conffiles}' gpush").contains(CONFIG));
        if is_edited {
            machine.write(CONFIG, EDITED);
            machine.sh("gpushctl config reload");
        }
        let before = machine.sh(&format!("cat {CONFIG}"));
        assert_eq!(before.ends_with("# An older comment"), !is_edited);
        unattended(machine, file);
        assert_eq!(machine.sh(&format!("cat {CONFIG}")), before);
        assert_eq!(machine.sh("gpushctl config show").contains("exclusive"), is_edited);
        machine.sh("apt-get -q purge --yes gpush 2>&1");
        assert!(!machine.run("test -e /etc/gpush").status.success());
    }
}
