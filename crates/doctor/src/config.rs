//! The config file: whether it is valid, and whether only root can write it.

use std::{fs, os::unix::fs::MetadataExt};

use gpush_core::{
    config::{Config, accounts_in},
    desired,
};
use gpush_host::config_accounts::notes_blocking;

use crate::{Agent, Area, Finding, Host, agent::CONFIG};

/// Returns a warning if the config names users or groups that the host does not have.
fn unknown_accounts(host: &Host, path: &str, bytes: &[u8]) -> Option<Finding> {
    let accounts = std::str::from_utf8(bytes).map(accounts_in).unwrap_or_default();
    let notes = notes_blocking(host.root(), Some(path), &accounts).unwrap_or_default();
    if notes.is_empty() {
        return None;
    }
    let message = format!("{path} names users or groups that gpushd cannot use");
    let hint = format!("correct the names, then run `gpushctl config check {path}` and `gpushctl config reload`");
    Some(notes.into_iter().fold(Finding::warning(Area::Config, message, hint), Finding::cause))
}

/// Returns the config with findings about it. If no config can be read, returns the defaults. If
/// gpushd runs with another file than that of the system service, examines the file that it uses.
pub(crate) fn examine(host: &Host, agent: &Agent) -> (Config, Vec<Finding>) {
    let path = agent.config_path();
    let file = host.path(path);
    let bytes = match fs::read(&file) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let found = Finding::ok(Area::Config, format!("{path} does not exist, so gpushd manages no GPU"));
            return (Config::default(), vec![found]);
        }
        Err(error) if error.kind() == std::io::ErrorKind::IsADirectory => {
            let message = format!("{path} is a directory, not a file");
            let hint = format!(
                "run `mv {path} {path}.old`, create the file, then run `gpushctl config check {path}` and \
                `systemctl reload gpushd`"
            );
            return (Config::default(), vec![Finding::problem(Area::Config, message, hint)]);
        }
        Err(error) => {
            let hint = "run `sudo gpushctl doctor`";
            let found = Finding::warning(Area::Config, format!("{path} cannot be read"), hint);
            return (Config::default(), vec![found.cause(error.to_string())]);
        }
    };
    let mut findings = Vec::new();
    // A gpushd that a user started accepts a file of this user.
    if path == CONFIG
        && let Ok(meta) = fs::metadata(&file)
        && (meta.uid() != 0 || meta.mode() & 0o022 != 0)
    {
        let message = format!("{CONFIG} can be changed by users who are not root, so gpushd does not load it");
        let hint = format!("run `chown root:root {CONFIG} && chmod 644 {CONFIG}`");
        findings.push(Finding::problem(Area::Config, message, hint));
    }
    match Config::from_bytes(&bytes, path) {
        Ok(config) => {
            if findings.is_empty() {
                let text = match config.rules.len() {
                    0 => "no rules, so gpushd manages no GPU".to_owned(),
                    1 => "1 rule".to_owned(),
                    rules => format!("{rules} rules"),
                };
                findings.push(Finding::ok(Area::Config, format!("{path}: {text}")));
            }
            findings.extend(unknown_accounts(host, path, &bytes));
            findings.extend(desired::lints(&config).into_iter().map(|found| {
                Finding::warning(Area::Config, found.message, format!("{} in {path}", found.hint)).lint(found.lint)
            }));
            (config, findings)
        }
        Err(errors) => {
            let error = gpush_api::ApiError::from(&errors);
            let hint = format!("correct the file, then run `gpushctl config check {path}`");
            let finding = Finding::problem(Area::Config, format!("{path} is not a valid config"), hint);
            findings.push(error.causes.into_iter().fold(finding, Finding::cause));
            (Config::default(), findings)
        }
    }
}
