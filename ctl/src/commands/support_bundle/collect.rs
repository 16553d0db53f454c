//! The files of a bundle. If a file cannot be collected, the bundle contains the reason instead.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
};

use gpush_api::{ApiError, Code, ConfigView, Gpu, Health, Version};
use gpush_client::{AuditQuery, Client, Error, EventQuery};
use gpush_core::config::Config;
use gpush_doctor::{Agent, Area, Host, examine};
use serde::Serialize;
use serde_json::{Value, json};

use super::allowed;
use crate::{
    args::Global,
    commands::{status, version::Versions, with_agent},
    exit::Failure,
    offline,
    output::Output,
    program as external,
    render::status::Status,
};

/// Maximum numbers of operations, ended leases and audit records in a bundle.
const OPERATIONS: usize = 200;
const ENDED_LEASES: usize = 200;
const AUDIT_RECORDS: usize = 1000;

/// Maximum number of bytes that the command reads from a file.
const LARGEST: u64 = 1 << 20;

/// Arguments with which journalctl prints gpushd's log as JSON. `-q` leaves out journalctl's own remarks.
const JOURNAL: [&str; 8] = ["-q", "-u", "gpushd", "-n", "2000", "-o", "json", "--no-pager"];

/// One file of the bundle.
#[derive(Debug)]
pub(super) struct Part {
    /// Name of the part's file.
    pub(super) name: &'static str,
    /// Why the bundle contains this file.
    pub(super) why: &'static str,
    /// The content of the file, or why it is missing.
    pub(super) content: Result<Content, String>,
}

#[derive(Debug)]
pub(super) enum Content {
    /// A JSON document. The bundle contains only its allowed values.
    Document(Value),
    /// Entries of gpushd's log, which [`allowed::log`] has returned.
    Log(Vec<Value>),
    /// The text of a program or file of the system, which contains no texts of users.
    Text(String),
}

/// Collects all files.
pub(super) fn all(global: &Global, out: &Output) -> Result<Vec<Part>, Failure> {
    let (mut parts, config, agent) = with_agent(global, async |client| Ok(Answers::new(client).collect(out).await))?;
    let host = Host::local();
    let findings = json!({ "checks": examine(&host, &agent, &Area::ALL) });
    let path = config.or_else(offline::environment).unwrap_or_else(|| PathBuf::from(offline::DEFAULT_CONFIG));
    let slurm = gpush_doctor::slurm_excerpt(&host).map(Content::Text);
    let part = |name, why, content| Part { name, why, content };
    parts.extend([
        part("doctor.json", "findings of `gpushctl doctor`", Ok(Content::Document(findings))),
        part("config-file.json", "the settings in the config file", config_file(&path)),
        part("journal.json", "what gpushd wrote to the log: the last 2000 entries", journal()),
        part("driver.txt", "version of the kernel module", file(Path::new("/proc/driver/nvidia/version"))),
        part("os-release.txt", "the distribution", file(Path::new("/etc/os-release"))),
        part("kernel.txt", "version of the kernel", file(Path::new("/proc/version"))),
        part("systemd.txt", "version of systemd", program("systemctl", &["--version"]).map(Content::Text)),
        part(
            "slurm.txt",
            "lines of slurm.conf, gres.conf and cgroup.conf that the doctor reads",
            slurm.ok_or_else(|| "this host has no slurm.conf".to_owned()),
        ),
    ]);
    Ok(parts)
}

/// The answers of gpushd. If gpushd does not answer a request, the command sends no more requests.
struct Answers<'c> {
    client: &'c mut Client,
    silent: Option<ApiError>,
}

impl<'c> Answers<'c> {
    fn new(client: &'c mut Client) -> Self {
        Self { client, silent: None }
    }

    /// Returns the collected files, the path of the config file, and what the doctor must know
    /// about gpushd.
    async fn collect(mut self, out: &Output) -> (Vec<Part>, Option<PathBuf>, Agent) {
        let version = self.ask(async |client| client.version().await).await;
        let health = self.ask(async |client| client.health().await).await;
        let config = self.ask(async |client| client.config().await).await;
        let status = self.status(out).await;
        let gpus = self.ask(async |client| client.gpus(true).await).await;
        let leases = self.ask(async |client| client.leases(ENDED_LEASES).await).await;
        let operations = self.ask(async |client| client.last_operations(OPERATIONS, None).await).await;
        let query = EventQuery { kinds: Vec::new(), gpus: Vec::new(), after: None };
        let events = self.ask(async |client| client.kept_events(&query).await).await;
        let audit = self.audit().await;
        let path = config.as_ref().ok().and_then(|config: &ConfigView| config.path.as_deref().map(PathBuf::from));
        let versions = Versions {
            ctl: env!("CARGO_PKG_VERSION"),
            api: gpush_client::API,
            agent: version.as_ref().ok(),
            error: version.as_ref().err().cloned(),
        };
        let part = |name, why, content| Part { name, why, content };
        let parts = vec![
            part("version.json", "versions of gpushctl, gpushd and the driver", document(Ok(versions))),
            part("status.json", "GPUs, MPS daemons and leases as `gpushctl status` shows them", document(status)),
            part(
                "gpus.json",
                "GPUs with the MIG profiles that the driver offers",
                document(gpus.as_ref().map_err(Clone::clone)),
            ),
            part("leases.json", "leases, and the last leases that ended", document(leases)),
            part("operations.json", "the last operations", document(operations)),
            part("events.json", "events that gpushd keeps", document(events)),
            part("audit.json", "who changed what", document(audit)),
            part("config.json", "the config in effect", document(config.clone()).map(with_settings)),
        ];
        let config = config.ok();
        (parts, path, agent(version, health, gpus.unwrap_or_default(), config))
    }

    async fn ask<T>(&mut self, what: impl AsyncFnOnce(&mut Client) -> Result<T, Error>) -> Result<T, ApiError> {
        if let Some(error) = &self.silent {
            return Err(error.clone());
        }
        let answer = what(self.client).await.map_err(ApiError::from);
        self.note(answer)
    }

    /// If gpushd has not answered, records this, so that the command sends no further request.
    fn note<T>(&mut self, answer: Result<T, ApiError>) -> Result<T, ApiError> {
        if let Err(error) = &answer
            && matches!(error.code, Code::Unreachable | Code::TimedOut)
        {
            self.silent = Some(error.clone());
        }
        answer
    }

    async fn status(&mut self, out: &Output) -> Result<Status, ApiError> {
        if let Some(error) = &self.silent {
            return Err(error.clone());
        }
        let answer = match status::read(self.client, false, &[], out).await {
            Ok((shown, _)) => Ok(shown),
            Err(Failure::Error(error)) => Err(*error),
            Err(Failure::BrokenPipe) => Err(ApiError::new(Code::Internal, "stdout is closed")),
        };
        self.note(answer)
    }

    /// Returns the last audit records, but only if root runs the command. So other users cannot include
    /// them by accident.
    async fn audit(&mut self) -> Result<Vec<gpush_api::AuditRecord>, ApiError> {
        if !nix::unistd::geteuid().is_root() {
            return Err(ApiError::new(Code::Denied, "only root gets the audit trail"));
        }
        let query = AuditQuery { after: None, limit: AUDIT_RECORDS, object: None, since: None };
        self.ask(async |client| client.audit(&query).await).await
    }
}

/// Returns what the doctor must know about gpushd.
fn agent(
    version: Result<Version, ApiError>,
    health: Result<Health, ApiError>,
    gpus: Vec<Gpu>,
    config: Option<ConfigView>,
) -> Agent {
    match (version, health) {
        (Ok(version), Ok(health)) => Agent::Reached {
            has_memory_limits: version.driver.is_some_and(|driver| driver.memory_limits),
            version: version.agent,
            own: env!("CARGO_PKG_VERSION").to_owned(),
            troubles: health.errors,
            gpus,
            config_path: config.as_ref().and_then(|config| config.path.clone()),
            rules: config.map(|config| config.rules).unwrap_or_default(),
        },
        (Err(error), _) | (_, Err(error)) => Agent::Unreachable(error),
    }
}

/// Converts an answer of gpushd.
fn document(answer: Result<impl Serialize, ApiError>) -> Result<Content, String> {
    let value = serde_json::to_value(answer.map_err(|error| error.sentences().join(": "))?);
    value.map(Content::Document).map_err(|error| error.to_string())
}

/// Reads the text of a file.
fn file(path: &Path) -> Result<Content, String> {
    let bytes = offline::read_up_to(path, LARGEST).map_err(|error| error.sentences().join(": "))?;
    Ok(Content::Text(String::from_utf8_lossy(&bytes).into_owned()))
}

/// Reads the settings in the config file.
fn config_file(path: &Path) -> Result<Content, String> {
    let bytes = offline::read_up_to(path, LARGEST).map_err(|error| error.sentences().join(": "))?;
    let config = Config::from_bytes(&bytes, &path.display().to_string())
        .map_err(|_| "the file is not valid: `gpushctl config check` shows its errors".to_owned())?;
    Ok(Content::Document(settings(&config.effective())))
}

/// Replaces the text of the config in an answer by its settings.
fn with_settings(mut content: Content) -> Content {
    if let Content::Document(document) = &mut content {
        document["effective"] = settings(document["effective"].as_str().unwrap_or_default());
    }
    content
}

/// Converts the text of a config to JSON.
fn settings(effective: &str) -> Value {
    toml::from_str(effective).unwrap_or_default()
}

/// Reads the entries that gpushd wrote to the journal.
fn journal() -> Result<Content, String> {
    let entries = allowed::log(&program("journalctl", &JOURNAL)?);
    if entries.is_empty() {
        return Err("the journal has no line of gpushd that this user can read".to_owned());
    }
    Ok(Content::Log(entries))
}

/// Runs a program and returns what it prints.
fn program(name: &str, arguments: &[&str]) -> Result<String, String> {
    let mut command = external::command(name).map_err(|error| error.message)?;
    let output = command.args(arguments).env("LC_ALL", "C").stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("cannot run {name}: {error}"))?;
    if !output.status.success() {
        let printed = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{name} failed ({}): {}", output.status, printed.trim()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
