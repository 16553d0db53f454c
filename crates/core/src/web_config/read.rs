//! Converts YAML nodes to a web config. Reports all problems at once, each with its position.
//!
//! No message contains a password hash, because messages go to logs.

use std::{
    collections::BTreeMap,
    ops::Range,
    path::{Path, PathBuf},
};

use super::{ClientCertificate, MOST_BYTES, PasswordHash, TlsSettings, TlsVersion, WebConfig};
use crate::{
    diagnostic::{self, Document, FileErrors, Problem},
    nearest::nearest,
    quote::Quoted,
    yaml::{self, MapEntry, Node, NodeKind},
};

const TOP: [&str; 2] = ["tls_server_config", "basic_auth_users"];
const TLS: [&str; 5] = ["cert_file", "key_file", "min_version", "client_auth_type", "client_ca_file"];
const CLIENT_AUTH: [&str; 3] = ["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"];

/// Keys of the exporter-toolkit that the relay does not implement.
const OTHER_KEYS: [&str; 10] = [
    "http_server_config",
    "rate_limit",
    "cert",
    "key",
    "client_ca",
    "client_allowed_sans",
    "max_version",
    "cipher_suites",
    "prefer_server_cipher_suites",
    "curve_preferences",
];

/// Costs of bcrypt that a hash may have. With a higher cost, one check would take several seconds.
const COSTS: std::ops::RangeInclusive<u32> = 4..=15;

/// Length of a bcrypt hash, and of the part after the cost.
const HASH: (usize, usize) = (60, 53);

pub(super) fn bytes(bytes: &[u8], path: &str) -> Result<WebConfig, FileErrors> {
    let fail = |text: &str, problem| Err(FileErrors::new(Document::WebConfig, path, text, vec![problem]));
    if bytes.len() > MOST_BYTES {
        let what = format!("the file has more than {MOST_BYTES} bytes");
        return fail("", Problem::new(0..0, what, "check that this is the web config"));
    }
    let text = match diagnostic::text(bytes) {
        // A byte order mark is not part of the YAML text.
        Ok(text) => text.strip_prefix('\u{feff}').unwrap_or(text),
        Err((lossy, problem)) => return fail(&lossy, problem),
    };
    let root = match yaml::document(text) {
        Ok(root) => root,
        Err(wrong) => {
            let mut problem = Problem::new(yaml::bytes(text, &wrong.span), wrong.message, wrong.hint);
            if let Some(first) = wrong.first {
                problem = problem.also(yaml::bytes(text, &first), "the first is");
            }
            return fail(text, problem);
        }
    };
    let directory = Path::new(path).parent().unwrap_or(Path::new(""));
    let mut reader = WebConfigReader { text, directory, problems: Vec::new() };
    // An empty file is valid: no TLS, no passwords.
    let config = root.map_or_else(WebConfig::default, |root| reader.top(&root));
    if reader.problems.is_empty() {
        Ok(config)
    } else {
        Err(FileErrors::new(Document::WebConfig, path, text, reader.problems))
    }
}

struct WebConfigReader<'t> {
    text: &'t str,
    directory: &'t Path,
    problems: Vec<Problem>,
}

impl WebConfigReader<'_> {
    fn report(&mut self, span: &Range<usize>, message: impl Into<String>, hint: impl Into<String>) {
        self.problems.push(Problem::new(yaml::bytes(self.text, span), message, hint));
    }

    fn top(&mut self, root: &Node) -> WebConfig {
        let Some(entries) = self.mapping(root, "the file") else { return WebConfig::default() };
        self.report_unknown_keys(entries, &TOP, "at the top of the file");
        let tls = entry(entries, "tls_server_config").and_then(|(key, value)| self.tls(key, value));
        let users = entry(entries, "basic_auth_users").map(|(_, value)| self.users(value)).unwrap_or_default();
        WebConfig { tls, users }
    }

    fn tls(&mut self, key: &Node, value: &Node) -> Option<TlsSettings> {
        let entries = self.mapping(value, "`tls_server_config`")?;
        self.report_unknown_keys(entries, &TLS, "in `tls_server_config`");
        let cert_file = self.file(key, entries, "cert_file");
        let key_file = self.file(key, entries, "key_file");
        let min_version = match entry(entries, "min_version") {
            Some((_, value)) => self.version(value),
            None => TlsVersion::V12,
        };
        let client_certificate = self.client_certificate(entries)?;
        Some(TlsSettings { cert_file: cert_file?, key_file: key_file?, min_version, client_certificate })
    }

    fn version(&mut self, value: &Node) -> TlsVersion {
        match value.text() {
            Some("TLS12") => TlsVersion::V12,
            Some("TLS13") => TlsVersion::V13,
            Some(old @ ("TLS10" | "TLS11")) => {
                self.report(&value.span, format!("{old} is not secure"), "write TLS12 or TLS13");
                TlsVersion::V12
            }
            Some(_) | None => {
                self.report(&value.span, "`min_version` is not a TLS version", "write TLS12 or TLS13");
                TlsVersion::V12
            }
        }
    }

    fn client_certificate(&mut self, entries: &[MapEntry]) -> Option<ClientCertificate> {
        let ca = entry(entries, "client_ca_file");
        let Some((key, value)) = entry(entries, "client_auth_type") else {
            if let Some((ca, _)) = ca {
                let hint = "add `client_auth_type: RequireAndVerifyClientCert`, or remove `client_ca_file`";
                self.report(&ca.span, "`client_ca_file` has no effect without `client_auth_type`", hint);
            }
            return Some(ClientCertificate::None);
        };
        let made: fn(PathBuf) -> ClientCertificate = match value.text() {
            Some("NoClientCert") => {
                if let Some((ca, _)) = ca {
                    let what = "`client_ca_file` has no effect with `client_auth_type: NoClientCert`";
                    self.report(&ca.span, what, "remove `client_ca_file`");
                }
                return Some(ClientCertificate::None);
            }
            Some("VerifyClientCertIfGiven") => ClientCertificate::IfGiven,
            Some("RequireAndVerifyClientCert") => ClientCertificate::Required,
            Some(name @ ("RequestClientCert" | "RequireClientCert" | "RequireAnyClientCert")) => {
                let what = format!("{name} does not verify the certificate of a client");
                self.report(&value.span, what, "write RequireAndVerifyClientCert");
                return None;
            }
            Some(_) | None => {
                let hint = format!("write one of: {}", CLIENT_AUTH.join(", "));
                self.report(&value.span, "`client_auth_type` has an unknown value", hint);
                return None;
            }
        };
        self.file(key, entries, "client_ca_file").map(made)
    }

    fn users(&mut self, value: &Node) -> BTreeMap<String, PasswordHash> {
        let mut users = BTreeMap::new();
        let Some(entries) = self.mapping(value, "`basic_auth_users`") else { return users };
        if entries.is_empty() {
            self.report(&value.span, "`basic_auth_users` has no user", "add a user, or remove the key");
        }
        for (key, value) in entries {
            let name = key.text().unwrap_or_default();
            if name.is_empty() || name.contains(':') || name.chars().any(char::is_control) {
                let what = format!("{} is not a user name", Quoted(name));
                self.report(&key.span, what, "write a name without a colon and without control characters");
                continue;
            }
            let shown = Quoted(name);
            match value.text().map(hash_problem) {
                Some(None) => {
                    let hash = value.text().unwrap_or_default().to_owned();
                    users.insert(name.to_owned(), PasswordHash(hash));
                }
                Some(Some(problem)) => {
                    let hint = "write what `htpasswd -nBC 10 NAME` prints after the colon";
                    self.report(&value.span, format!("the password of {shown} {problem}"), hint);
                }
                None => self.report(&value.span, format!("{shown} has no password hash"), "write a bcrypt hash"),
            }
        }
        users
    }

    /// Returns the entries of a mapping.
    fn mapping<'n>(&mut self, node: &'n Node, what: &str) -> Option<&'n [MapEntry]> {
        match &node.kind {
            NodeKind::Map(entries) => Some(entries),
            NodeKind::Scalar { .. } | NodeKind::List(_) => {
                let hint = "write `KEY: VALUE` lines";
                self.report(&node.span, format!("{what} is {}, but must be a mapping", node.what()), hint);
                None
            }
        }
    }

    /// Returns the path of a required file. Reports a missing path at `owner`.
    fn file(&mut self, owner: &Node, entries: &[MapEntry], name: &str) -> Option<PathBuf> {
        let owned_by = Quoted(owner.text().unwrap_or_default());
        let Some((_, value)) = entry(entries, name) else {
            let shown = if owned_by.0 == "client_auth_type" {
                "the value of `client_auth_type`".to_owned()
            } else {
                owned_by.to_string()
            };
            self.report(&owner.span, format!("{shown} needs `{name}`"), format!("add `{name}: FILE`"));
            return None;
        };
        match value.text() {
            Some(path) if !path.is_empty() => Some(self.directory.join(path)),
            Some(_) | None => {
                self.report(&value.span, format!("`{name}` is not a path"), "write the path of a PEM file");
                None
            }
        }
    }

    fn report_unknown_keys(&mut self, entries: &[MapEntry], known: &[&'static str], place: &str) {
        for (key, _) in entries {
            let name = key.text().unwrap_or_default();
            if known.contains(&name) {
                continue;
            }
            let list = known.join(", ");
            if OTHER_KEYS.contains(&name) {
                let what = format!("gpushctl does not implement {} {place}", Quoted(name));
                self.report(&key.span, what, format!("remove the key; gpushctl implements: {list}"));
                continue;
            }
            let hint = match nearest(name, known.iter().copied()) {
                Some(meant) => format!("did you mean `{meant}`?"),
                None => format!("write one of: {list}"),
            };
            self.report(&key.span, format!("unknown key {} {place}", Quoted(name)), hint);
        }
    }
}

fn entry<'n>(entries: &'n [MapEntry], name: &str) -> Option<(&'n Node, &'n Node)> {
    entries.iter().find(|(key, _)| key.text() == Some(name)).map(|(key, value)| (&**key, &**value))
}

/// Returns why a text is not a bcrypt hash that gpushctl can check; `None` if it is one.
fn hash_problem(text: &str) -> Option<String> {
    let not_a_hash = || Some("is not a bcrypt hash".to_owned());
    let mut parts = text.split('$');
    let (Some(""), Some("2a" | "2b" | "2y"), Some(cost), Some(rest), None) =
        (parts.next(), parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return not_a_hash();
    };
    let is_base64 = rest.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'/'));
    match cost.parse::<u32>() {
        Ok(number) if (text.len(), rest.len()) == HASH && is_base64 => (!COSTS.contains(&number))
            .then(|| format!("has bcrypt cost {number}, but gpushctl accepts {} to {}", COSTS.start(), COSTS.end())),
        Ok(_) | Err(_) => not_a_hash(),
    }
}
