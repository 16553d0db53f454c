use std::path::Path;

use super::*;

/// Hash of the password `secret`.
const HASH: &str = "$2y$04$abcdefghijklmnopqrstuuPZbVvVEeJ5Ub7WmH0Zq1rYxN1u0Ck2C";

fn parse(text: &str) -> Result<WebConfig, Vec<(usize, String)>> {
    let located = |errors: FileErrors| errors.located().into_iter().map(|one| (one.line, one.message)).collect();
    WebConfig::from_bytes(text.as_bytes(), "/etc/gpush/web.yml").map_err(located)
}

#[test]
fn complete_file_is_read_and_paths_are_relative_to_it() {
    let text = format!(
        "tls_server_config:\n  cert_file: tls/cert.pem\n  key_file: /srv/key.pem\n  min_version: TLS13\n  \
         client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\nbasic_auth_users:\n  prometheus: {HASH}\n  \
         'second': \"{HASH}\"\n"
    );
    let config = parse(&text).unwrap();
    let tls = config.tls.as_ref().unwrap();
    assert_eq!(tls.cert_file, Path::new("/etc/gpush/tls/cert.pem"));
    assert_eq!(tls.key_file, Path::new("/srv/key.pem"));
    assert_eq!(tls.min_version, TlsVersion::V13);
    assert_eq!(tls.client_certificate, ClientCertificate::Required("/etc/gpush/ca.pem".into()));
    assert_eq!(config.users.keys().collect::<Vec<_>>(), ["prometheus", "second"]);
    assert_eq!(config.users["prometheus"].text(), HASH);
    assert!(!format!("{config:?}").contains("$2y$"), "a log could contain the hash");
}

#[test]
fn empty_file_has_neither_tls_nor_passwords() {
    for text in ["", "# nothing\n", "---\n"] {
        assert_eq!(parse(text).unwrap_or_default(), WebConfig::default(), "{text:?}");
    }
    assert!(!parse("").unwrap().has_password());
}

#[test]
fn each_bad_key_or_value_is_reported_with_its_line() {
    let tls = "tls_server_config:\n  cert_file: c\n  key_file: k\n";
    for (text, line, part) in [
        ("[1]", 1, "the file is a list, but must be a mapping"),
        ("a: b: c", 1, "this is not YAML"),
        ("tls_server:\n", 1, "unknown key `tls_server` at the top"),
        ("http_server_config:\n  http2: false\n", 1, "does not implement `http_server_config`"),
        ("tls_server_config: yes\n", 1, "`tls_server_config` is a single value"),
        ("tls_server_config:\n  cert_file: c\n", 1, "`tls_server_config` needs `key_file`"),
        ("tls_server_config:\n  key_file: c\n", 1, "`tls_server_config` needs `cert_file`"),
        (&format!("{tls}  cert_fle: x\n"), 4, "unknown key `cert_fle` in `tls_server_config`"),
        (&format!("{tls}  cipher_suites: []\n"), 4, "does not implement `cipher_suites`"),
        (&format!("{tls}  cert_file: c\n"), 4, "`cert_file` is repeated"),
        (&format!("{tls}  min_version: TLS11\n"), 4, "TLS11 is not secure"),
        (&format!("{tls}  min_version: [TLS12]\n"), 4, "`min_version` is not a TLS version"),
        (&format!("{tls}  client_auth_type: Any\n"), 4, "`client_auth_type` has an unknown value"),
        (&format!("{tls}  client_auth_type: RequireAnyClientCert\n"), 4, "does not verify"),
        (&format!("{tls}  client_auth_type: RequireAndVerifyClientCert\n"), 4, "needs `client_ca_file`"),
        (&format!("{tls}  client_ca_file: ca\n"), 4, "has no effect without `client_auth_type`"),
        ("tls_server_config:\n  cert_file: ''\n  key_file: k\n", 2, "`cert_file` is not a path"),
        ("basic_auth_users: {}\n", 1, "`basic_auth_users` has no user"),
        ("basic_auth_users:\n", 1, "`basic_auth_users` is nothing"),
        ("basic_auth_users:\n  a: [x]\n", 2, "`a` has no password hash"),
        ("basic_auth_users:\n  a: secret\n", 2, "the password of `a` is not a bcrypt hash"),
        (&format!("basic_auth_users:\n  a: {}\n", HASH.replace("$04$", "$31$")), 2, "has bcrypt cost 31"),
        (&format!("basic_auth_users:\n  'a:b': {HASH}\n"), 2, "`a:b` is not a user name"),
    ] {
        let problems = parse(text).unwrap_err();
        assert!(problems.iter().any(|(at, what)| *at == line && what.contains(part)), "{text:?}: {problems:?}");
    }
}

/// The package contains this file.
#[test]
fn example_is_valid() {
    let config = parse(include_str!("../../../../packaging/web-config.example.yml")).unwrap();
    check_address("0.0.0.0:9945".parse().unwrap(), Some((&config, "web.yml"))).unwrap();
}

#[test]
fn no_message_contains_a_hash_or_a_password() {
    let text = format!("basic_auth_users:\n  a: {}\n  b: hunter2\n", HASH.replace("$04$", "$31$"));
    let error = ApiError::from(&WebConfig::from_bytes(text.as_bytes(), "web.yml").unwrap_err());
    assert_eq!(error.causes.len(), 2, "{error:?}");
    let shown = format!("{error:?}");
    assert!(!shown.contains("PZbVvVEeJ5Ub7") && !shown.contains("hunter2"), "{shown}");
}

#[test]
fn address_that_others_can_reach_needs_tls_and_a_password() {
    let config = |has_tls: bool, has_password: bool| {
        let tls = if has_tls { "tls_server_config:\n  cert_file: c\n  key_file: k\n" } else { "" };
        let users = if has_password { format!("basic_auth_users:\n  a: {HASH}\n") } else { String::new() };
        parse(&format!("{tls}{users}")).unwrap()
    };
    let check = |address: &str, config: Option<&WebConfig>| {
        check_address(address.parse().unwrap(), config.map(|config| (config, "web.yml")))
    };
    for address in ["127.0.0.1:9945", "127.3.2.1:1", "[::1]:9945", "[::ffff:127.0.0.1]:9945"] {
        check(address, None).unwrap();
    }
    for address in ["0.0.0.0:9945", "10.0.0.1:9945", "[::]:9945", "[::ffff:10.0.0.1]:1", "169.254.0.1:1"] {
        check(address, Some(&config(true, true))).unwrap();
        for (has_tls, has_password, missing) in [
            (true, false, "`basic_auth_users`"),
            (false, true, "`tls_server_config`"),
            (false, false, "`tls_server_config` and `basic_auth_users`"),
        ] {
            let error = check(address, Some(&config(has_tls, has_password))).unwrap_err();
            assert_eq!(error.causes, [format!("the web config web.yml has no {missing}")]);
        }
        let error = check(address, None).unwrap_err();
        assert!(error.hint.unwrap().contains("--web-config"), "{address}");
    }
}
