//! Tests of `gpushctl metrics serve` with TLS and passwords.

use std::{net::TcpStream, os::unix::fs::PermissionsExt, sync::Arc};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};

use super::{
    relay::{HttpAnswer, Relay, exchange, request},
    *,
};

const TLS: &str = "tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\n";

/// A self-signed certificate and its key, as PEM.
struct Identity {
    certificate: String,
    key: String,
}

impl Identity {
    fn new() -> Self {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        Self { certificate: made.cert.pem(), key: made.signing_key.serialize_pem() }
    }

    /// Writes the certificate and the key of the relay.
    fn write(&self, host: &Host) {
        host.write("cert.pem", &self.certificate);
        write_secret(host, "key.pem", &self.key);
    }

    fn certificate(&self) -> CertificateDer<'static> {
        CertificateDer::from_pem_slice(self.certificate.as_bytes()).unwrap()
    }

    /// Connects to a relay that has this certificate. `own` is the certificate of the client.
    fn connect(&self, relay: &Relay, own: Option<&Self>) -> StreamOwned<ClientConnection, TcpStream> {
        let mut roots = RootCertStore::empty();
        roots.add(self.certificate()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let builder = builder.with_root_certificates(roots);
        let config = match own {
            None => builder.with_no_client_auth(),
            Some(own) => {
                let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).unwrap();
                builder.with_client_auth_cert(vec![own.certificate()], key).unwrap()
            }
        };
        let connection = ClientConnection::new(Arc::new(config), "localhost".try_into().unwrap()).unwrap();
        StreamOwned::new(connection, relay.connect())
    }

    /// Scrapes a relay that has this certificate.
    fn scrape(&self, relay: &Relay, login: Option<&str>) -> HttpAnswer {
        let login = login.map(basic);
        let headers: Vec<(&str, &str)> = login.iter().map(|login| ("authorization", login.as_str())).collect();
        exchange(&mut self.connect(relay, None), &request("GET", "/metrics", &headers))
    }
}

fn basic(login: &str) -> String {
    format!("Basic {}", BASE64_STANDARD.encode(login))
}

fn users(password: &str) -> String {
    format!("basic_auth_users:\n  prometheus: {}\n", bcrypt::hash(password, 4).unwrap())
}

/// Writes a file that only its owner can read.
fn write_secret(host: &Host, name: &str, text: &str) {
    let path = host.write(name, text);
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
}

#[test]
fn scraper_with_the_password_sees_the_metrics_of_leases() {
    let host = Host::new();
    let agent = agent(&host);
    let identity = Identity::new();
    identity.write(&host);
    write_secret(&host, "web.yml", &format!("{TLS}  min_version: TLS13\n{}", users("secret")));
    let relay = Relay::start(&host, &["--web-config", "web.yml"]);
    assert_eq!(relay.first_lines, [] as [&str; 0], "there is no warning");
    for wrong in [None, Some("prometheus:wrong"), Some("prometheus:"), Some("anna:secret"), Some("")] {
        let answer = identity.scrape(&relay, wrong);
        assert_eq!(answer.status, 401, "{wrong:?}");
        assert!(answer.head.contains("www-authenticate: basic realm=") && !answer.body.contains("gpush_"));
    }
    assert_eq!(agent.asked(), [] as [&str; 0], "gpushd got no request");
    for _ in 0..2 {
        let answer = identity.scrape(&relay, Some("prometheus:secret"));
        assert_eq!((answer.status, answer.body), (200, format!("{PUBLIC}{OF_LEASES}")));
    }
    let page = exchange(&mut identity.connect(&relay, None), &request("GET", "/", &[]));
    assert_eq!(page.status, 401, "each path needs the password");
}

/// A scraper without TLS gets nothing, although the password is right.
#[test]
fn plain_request_to_a_tls_relay_gets_no_metrics() {
    let host = Host::new();
    let agent = agent(&host);
    Identity::new().write(&host);
    write_secret(&host, "web.yml", &format!("{TLS}{}", users("secret")));
    let relay = Relay::start(&host, &["--web-config", "web.yml"]);
    let mut stream = relay.connect();
    let login = basic("prometheus:secret");
    std::io::Write::write_all(&mut stream, request("GET", "/metrics", &[("authorization", &login)]).as_bytes())
        .unwrap();
    let mut bytes = Vec::new();
    let _ = std::io::Read::read_to_end(&mut stream, &mut bytes);
    assert!(!String::from_utf8_lossy(&bytes).contains("HTTP"), "{bytes:?}");
    assert_eq!(agent.asked(), [] as [&str; 0]);
}

#[test]
fn client_without_its_certificate_is_refused() {
    let host = Host::new();
    agent(&host);
    let (identity, client) = (Identity::new(), Identity::new());
    identity.write(&host);
    host.write("clients.pem", &client.certificate);
    let verify = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: clients.pem\n";
    write_secret(&host, "web.yml", &format!("{TLS}{verify}"));
    let relay = Relay::start(&host, &["--web-config", "web.yml"]);
    let scrape = |own: Option<&Identity>| {
        let mut stream = identity.connect(&relay, own);
        let mut text = Vec::new();
        std::io::Write::write_all(&mut stream, request("GET", "/metrics", &[]).as_bytes())
            .and_then(|()| std::io::Read::read_to_end(&mut stream, &mut text))
            .map(|_| String::from_utf8(text).unwrap())
    };
    assert!(scrape(Some(&client)).unwrap().ends_with(PUBLIC), "there is no password, so no metrics of leases");
    assert!(scrape(None).is_err());
    assert!(scrape(Some(&Identity::new())).is_err());
}

#[test]
fn changed_files_are_read_again_and_invalid_files_change_nothing() {
    let host = Host::new();
    agent(&host);
    let old = Identity::new();
    old.write(&host);
    write_secret(&host, "web.yml", &format!("{TLS}{}", users("one")));
    let mut relay = Relay::start(&host, &["--web-config", "web.yml"]);
    assert_eq!(old.scrape(&relay, Some("prometheus:one")).status, 200);

    let new = Identity::new();
    new.write(&host);
    write_secret(&host, "web.yml", &format!("{TLS}{}", users("two")));
    relay.reload("read the web config again");
    assert_eq!(new.scrape(&relay, Some("prometheus:one")).status, 401);
    assert_eq!(new.scrape(&relay, Some("prometheus:two")).status, 200);

    for broken in [String::new() + "tls_server_cfg: x\n", format!("{TLS}basic_auth_users:\n  a: hunter2\n")] {
        write_secret(&host, "web.yml", &broken);
        let lines = relay.reload("the previous settings stay in use");
        assert!(lines.contains("error: the web config web.yml has an error") && !lines.contains("hunter2"), "{lines}");
        assert_eq!(new.scrape(&relay, Some("prometheus:two")).status, 200);
        assert_eq!(new.scrape(&relay, None).status, 401);
    }
}

/// Fault: a relay on the loopback interface served without TLS and passwords after its web config had been emptied.
#[test]
fn emptied_web_config_removes_no_protection() {
    let host = Host::new();
    agent(&host);
    let identity = Identity::new();
    identity.write(&host);
    write_secret(&host, "web.yml", &format!("{TLS}{}", users("one")));
    let mut relay = Relay::start(&host, &["--web-config", "web.yml"]);
    for (text, lost) in [(String::new(), "TLS and passwords"), (TLS.to_owned(), "passwords"), (users("one"), "TLS")] {
        write_secret(&host, "web.yml", &text);
        let lines = relay.reload("the previous settings stay in use");
        assert!(lines.contains(&format!("the web config web.yml has no {lost} any more")), "{lines}");
        assert_eq!(identity.scrape(&relay, None).status, 401);
        assert_eq!(identity.scrape(&relay, Some("prometheus:one")).status, 200);
    }
}

#[test]
fn files_that_others_can_change_are_refused() {
    let host = Host::new();
    let mut text = String::new();
    Identity::new().write(&host);
    write_secret(&host, "web.yml", &format!("{TLS}{}", users("one")));
    let set = |name: &str, mode| std::fs::set_permissions(host.path(name), PermissionsExt::from_mode(mode)).unwrap();
    for (name, mode) in [("web.yml", 0o666), ("key.pem", 0o620)] {
        set(name, mode);
        text += &host.run(&["metrics", "serve", "--web-config", "web.yml"]);
        set(name, 0o600);
    }
    nix::unistd::mkfifo(&host.path("fifo.yml"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    text += &host.run(&["metrics", "serve", "--web-config", "fifo.yml"]);
    insta::assert_snapshot!(text);
}

/// The relay notices the new file when the next scraper connects.
#[test]
fn changed_file_is_read_again_without_a_signal() {
    let host = Host::new();
    agent(&host);
    write_secret(&host, "web.yml", &users("one"));
    let mut relay = Relay::start(&host, &["--web-config", "web.yml"]);
    let status = |relay: &Relay, login: &str| relay.get("/metrics", &[("authorization", &basic(login))]).status;
    assert_eq!(status(&relay, "prometheus:one"), 200);
    write_secret(&host, "web.yml", &users("two"));
    while status(&relay, "prometheus:one") == 200 {}
    relay.lines_until("read the web config again");
    assert_eq!(status(&relay, "prometheus:two"), 200);
}

#[test]
fn faults_of_certificates_are_explained() {
    let host = Host::new();
    let (one, two) = (Identity::new(), Identity::new());
    write_secret(&host, "web.yml", TLS);
    let mut text = host.run(&["metrics", "serve", "--web-config", "web.yml"]);
    one.write(&host);
    write_secret(&host, "key.pem", &two.key);
    text += &host.run(&["metrics", "serve", "--web-config", "web.yml"]);
    write_secret(&host, "key.pem", &one.certificate);
    text += &host.run(&["metrics", "serve", "--web-config", "web.yml"]);
    host.write("cert.pem", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n");
    text += &host.run(&["metrics", "serve", "--web-config", "web.yml"]);
    insta::assert_snapshot!(text);
}

#[test]
fn key_that_all_users_can_read_causes_a_warning() {
    let host = Host::new();
    let identity = Identity::new();
    identity.write(&host);
    let mode = |name: &str, mode| std::fs::set_permissions(host.path(name), PermissionsExt::from_mode(mode)).unwrap();
    mode("key.pem", 0o644);
    write_secret(&host, "web.yml", &format!("{TLS}{}", users("one")));
    mode("web.yml", 0o644);
    let relay = Relay::start(&host, &["--web-config", "web.yml"]);
    let lines = relay.first_lines.concat();
    for file in ["private key key.pem", "password hashes in web.yml"] {
        assert!(lines.contains(&format!("warning: every user of this host can read the {file}")), "{lines}");
    }
}
