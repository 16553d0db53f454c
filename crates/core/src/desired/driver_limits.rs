//! Warnings about settings of MPS that the driver of a host does not support.

use gpush_api::{Driver, Gpu, MPS_CLIENTS, Mode, MpsUsers};

use super::claims;
use crate::config::{Config, Rule};

/// First driver whose MPS daemon can serve several users.
const MANY_USERS: u32 = 555;
/// First CUDA version with which a GPU serves more than [`MPS_CLIENTS`] clients.
const MORE_CLIENTS: (u32, u32) = (13, 1);

/// Returns whether an MPS daemon of this driver can serve several users at a time. True if the version cannot be parsed.
#[must_use]
pub fn serves_many_users(driver: &Driver) -> bool {
    let major = driver.version.split('.').next().and_then(|major| major.parse::<u32>().ok());
    major.is_none_or(|major| major >= MANY_USERS)
}

fn serves_more_clients(driver: &Driver) -> bool {
    let mut numbers = driver.cuda.split('.').map(|number| number.parse::<u32>().ok());
    match (numbers.next().flatten(), numbers.next().flatten()) {
        (Some(major), minor) => (major, minor.unwrap_or(0)) >= MORE_CLIENTS,
        (None, _) => true,
    }
}

/// Returns one sentence for each setting that the driver does not support, of rules that claim a GPU.
pub(super) fn find(config: &Config, gpus: &[Gpu], driver: &Driver) -> Vec<String> {
    let claimed = claims(config, gpus);
    let rules = config.rules.iter().enumerate().filter(|(position, _)| claimed.contains(&Some(*position)));
    rules
        .flat_map(|(position, rule)| {
            let label = rule.label(position);
            let found = [many_users(config, rule, driver), more_clients(rule, driver)];
            found.into_iter().flatten().map(move |text| format!("{label}: {text}"))
        })
        .collect()
}

fn many_users(config: &Config, rule: &Rule, driver: &Driver) -> Option<String> {
    let shares_devices = || config.layout_of(rule).is_some_and(|layout| layout.shared().is_some());
    let shares = rule.mode == Mode::Mps || rule.mode == Mode::Mig && shares_devices();
    let wants = shares && rule.mps_policy().users == MpsUsers::Many;
    (wants && !serves_many_users(driver)).then(|| {
        format!(
            "`users = \"many\"` needs driver {MANY_USERS} or later; this host has driver {}, so each MPS daemon serves \
             one user at a time",
            driver.version
        )
    })
}

fn more_clients(rule: &Rule, driver: &Driver) -> Option<String> {
    let wanted = rule.mps.as_ref()?.max_clients;
    let (major, minor) = MORE_CLIENTS;
    (wanted > MPS_CLIENTS && !serves_more_clients(driver)).then(|| {
        format!(
            "`max_clients = {wanted}` needs CUDA {major}.{minor} or later; the driver of this host has CUDA {}, so a GPU \
             serves at most {MPS_CLIENTS} clients",
            driver.cuda
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::preset;

    fn found(rule: &str, version: &str, cuda: &str) -> Vec<String> {
        let config = Config::parse(&format!("[[gpu]]\nmatch = \"all\"\n{rule}"), "config.toml").unwrap();
        let driver = Driver {
            version: version.to_owned(),
            nvml: String::new(),
            cuda: cuda.to_owned(),
            library: String::new(),
            simulated: true,
            memory_limits: false,
        };
        find(&config, &preset::gpus("dgx-a100").unwrap(), &driver)
    }

    #[test]
    fn settings_beyond_the_driver_are_reported() {
        let (many, clients) =
            ("mode = \"mps\"\nmps = { users = \"many\" }\n", "mode = \"mps\"\nmps = { max_clients = 60 }\n");
        assert_eq!(
            found(many, "550.163.01", "12.4"),
            [
                "rule 1: `users = \"many\"` needs driver 555 or later; this host has driver 550.163.01, so each MPS daemon \
              serves one user at a time"
            ]
        );
        assert_eq!(
            found(clients, "550.163.01", "12.4"),
            [
                "rule 1: `max_clients = 60` needs CUDA 13.1 or later; the driver of this host has CUDA 12.4, so a GPU serves \
              at most 48 clients"
            ]
        );
        let shared = "mode = \"mig\"\nlayout = [\"3g.40gb:mps\"]\nmps = { users = \"many\" }\n";
        assert_eq!(found(shared, "535.1", "12.2").len(), 1);
        for (rule, version, cuda) in [
            (many, "555.42.02", "12.5"),
            (many, "R", ""),
            (clients, "590.1", "13.1"),
            (clients, "600.1", "14"),
            ("mode = \"mps\"\nmps = { max_clients = 48 }\n", "550.1", "12.4"),
            ("mode = \"mig\"\nlayout = [\"3g.40gb\"]\n", "550.1", "12.4"),
        ] {
            assert_eq!(found(rule, version, cuda), [] as [&str; 0], "{rule} {version} {cuda}");
        }
    }
}
