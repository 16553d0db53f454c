use serde_json::json;

use super::*;

fn redactor() -> Redactor {
    let mut redactor = Redactor::new(false);
    redactor.learn_passwd(
        "root:x:0:0::/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nal:x:1001:1:::\nslurm:x:64030:64030:::\n",
    );
    redactor
}

#[test]
fn fields_of_documents_lose_names_and_command_lines() {
    let mut document = json!({"processes": [{"pid": 7, "uid": 1002, "user": "bob", "command": "python x --key=1"}],
        "by": {"uid": 0, "user": "root"}, "reason": "bob asked, see python x --key=1", "command": null});
    let mut redactor = redactor();
    redactor.learn(&document);
    redactor.document(&mut document);
    assert_eq!(
        document,
        json!({"processes": [{"pid": 7, "uid": 1002, "user": "uid:1002", "command": "(command)"}],
            "by": {"uid": 0, "user": "uid:0"}, "reason": "uid:1002 asked, see (command)", "command": null})
    );
}

#[test]
fn messages_about_ended_processes_lose_command_lines() {
    for (line, redacted) in [
        ("in use by pid 7 (alice, sh -c 'f(1)' k) now", "in use by pid 7 (command) now"),
        ("pid 7 (alice, a) and pid 8 (bob, b)", "pid 7 (command)"),
        ("pid 7 (alice, cut in the mid", "pid 7 (command)"),
        ("2026 n1 gpushd[9]: process 7 (x --pw 1) has no lease", "2026 n1 gpushd[9]: process 7 (command) has no lease"),
        ("python: x (pid 7, ldap) holds it", "(command) (pid 7, (user)) holds it"),
        ("2026 n1 gpushd[9]: python x (pid 7, uid 5)", "2026 n1 gpushd[9]: (command) (pid 7, uid 5)"),
        ("pid 7 of ldap: python x", "pid 7 of (user): (command)"),
        ("a client waits command=\"x y\" more", "a client waits command=(command)"),
        ("another gpushd (pid 7) has the socket", "another gpushd (pid 7) has the socket"),
        ("GPU 0 (A100) process list", "GPU 0 (A100) process list"),
    ] {
        assert_eq!(redactor().text(line), redacted, "{line}");
    }
}

#[test]
fn names_are_replaced_as_whole_words_only() {
    let text = "alice's /home/alice/x, al, alt, alice2, root, slurm.conf\nal\n";
    let redacted = "uid:1000's /home/uid:1000/x, uid:1001, alt, alice2, root, slurm.conf\nuid:1001\n";
    assert_eq!(redactor().text(text), redacted);
}

#[test]
fn name_of_a_program_is_not_removed_from_messages() {
    let mut redactor = redactor();
    redactor
        .learn(&json!([{"pid": 7, "command": "active"}, {"pid": 8, "command": "sh"}, {"pid": 9, "command": "in use"}]));
    assert_eq!(redactor.text("shared, active, in use"), "shared, active, in use");
}

#[test]
fn known_command_line_that_is_cut_is_removed() {
    let mut redactor = redactor();
    redactor.learn(&json!({"pid": 7, "command": "python train.py --run secretive"}));
    assert_eq!(redactor.text("ended python train.py --run sec…"), "ended (command)…");
    assert_eq!(redactor.text("the program python train.py ended"), "the program python train.py ended");
}

/// The processes of MPS are on the list of GPU processes.
#[test]
fn programs_of_the_config_are_kept() {
    let config = "[mps]\ncontrol = \"/usr/bin/nvidia-cuda-mps-control\"\nserver = \"/usr/bin/nvidia-cuda-mps-server\"\n\
                  [processes]\nallow = [{ exe = \"/opt/monitor/collector\" }]\n";
    let mut document = json!({"effective": config, "clients": [
        {"pid": 1, "command": "nvidia-cuda-mps-server"}, {"pid": 2, "command": "/usr/bin/nvidia-cuda-mps-control"},
        {"pid": 3, "command": "/usr/bin/nvidia-cuda-mps-control -d"}, {"pid": 4, "command": "/opt/monitor/collector"},
        {"pid": 5, "command": "./zeta-model.py"}, {"pid": 6, "command": "zeta-model.py"},
        {"pid": 7, "command": "nvidia-cuda-mps-"}, {"pid": 8, "command": "/usr/bin/nvidia"},
    ]});
    let mut redactor = redactor();
    redactor.keep_programs(config);
    redactor.learn(&document);
    assert_eq!(redactor.text(config), config);
    for (line, redacted) in [
        ("cannot run nvidia-cuda-mps-server: no such file", "cannot run nvidia-cuda-mps-server: no such file"),
        ("2026 n1 gpushd[9]: started ./zeta-model.py.", "2026 n1 gpushd[9]: started (command)."),
        ("zeta-model.py, zeta-model.pyc, /opt/zeta-model.py", "(command), zeta-model.pyc, /opt/zeta-model.py"),
    ] {
        assert_eq!(redactor.text(line), redacted);
    }
    redactor.document(&mut document);
    assert_eq!(document["effective"], config);
    assert!(document["clients"].as_array().unwrap().iter().all(|client| client["command"] == "(command)"));
}

#[test]
fn command_line_is_replaced_as_a_whole() {
    let mut redactor = redactor();
    redactor.learn(&json!([{"pid": 7, "command": "python a.py"}, {"pid": 8, "command": "python a.py --run zeta"}]));
    // The text in place of the command line of a process, if a lease holds the GPU.
    redactor.learn(&json!({"pid": null, "command": "lease L12 until 10:00"}));
    for (line, redacted) in [
        ("ended python a.py.", "ended (command)."),
        ("ended python a.py --run zeta", "ended (command)"),
        ("ended /usr/bin/python a.py", "ended /usr/bin/(command)"),
        ("`python a.py`, python a.pyc, xpython a.py", "`(command)`, python a.pyc, xpython a.py"),
        ("waits for lease L12 until 10:00", "waits for lease L12 until 10:00"),
    ] {
        assert_eq!(redactor.text(line), redacted);
    }
}

/// Secrets, and the texts without them.
const PLANTED: &[(&str, &str)] = &[
    // Settings: with and without blanks and quotes.
    ("password = Passw0rd", "password = (secret)"),
    ("password=foo1234X rest", "password=(secret) rest"),
    ("password: abc\nnext", "password: (secret)\nnext"),
    ("password = \"correct horse\" # why", "password = \"(secret)\" # why"),
    ("password = 'correct horse'", "password = '(secret)'"),
    ("password = \"a\\\"b c\"", "password = \"(secret)\""),
    ("password = \"\"\"\ncorrect\nhorse\"\"\"\nb = 1", "password = \"\"\"(secret)\"\"\"\nb = 1"),
    ("password = \"never closed horse\nnext", "password = \"(secret)\nnext"),
    ("# db_password=hunter3", "# db_password=(secret)"),
    ("tokens = [\"a1\", \"b2\"]\nx = 1", "tokens = (secret)\nx = 1"),
    ("secrets = [\n  \"a1\",\n  \"b2\",\n]\nx = 1", "secrets = (secret)\nx = 1"),
    ("pass: hunter2", "pass: (secret)"),
    ("pw=a", "pw=(secret)"),
    ("pwd=a", "pwd=(secret)"),
    ("pass=a", "pass=(secret)"),
    ("passwd := a", "passwd := (secret)"),
    ("passphrase=a", "passphrase=(secret)"),
    ("private_key=a", "private_key=(secret)"),
    ("secret=a", "secret=(secret)"),
    ("api_key=a", "api_key=(secret)"),
    ("apikey: a", "apikey: (secret)"),
    ("apiKey = a", "apiKey = (secret)"),
    ("aws.accessKeyId1=x dbPassword2=a", "aws.accessKeyId1=(secret) dbPassword2=(secret)"),
    ("HFTOKEN=a GH_TOKENS=b", "HFTOKEN=(secret) GH_TOKENS=(secret)"),
    ("credentials => a", "credentials => (secret)"),
    // A value that contains a word of the table.
    ("password=tokenabc9", "password=(secret)"),
    ("token=abc-password-9", "token=(secret)"),
    ("reason password=hunter3SECRET", "reason password=(secret)"),
    // JSON, also within a JSON string.
    ("{\"password\": \"correct horse\", \"a\": 1}", "{\"password\": \"(secret)\", \"a\": 1}"),
    ("{\\\"password\\\":\\\"correct horse\\\",\\\"a\\\":1}", "{\\\"password\\\":\\\"(secret)\\\",\\\"a\\\":1}"),
    ("os.environ['API_KEY'] = 'a b'", "os.environ['API_KEY'] = '(secret)'"),
    ("{\"token\": {\"a\": [\"b\"]}, \"c\": 1}", "{\"token\": (secret), \"c\": 1}"),
    // Command lines.
    ("alice python --token=abc x", "alice python --token=(secret) x"),
    ("run --api-key abc x", "run --api-key (secret) x"),
    ("run --key=abc --pass 'a b' x", "run --key=(secret) --pass '(secret)' x"),
    ("args = [\"--password\", \"a b\", \"-v\"]", "args = [\"--password\", \"(secret)\", \"-v\"]"),
    ("args = [\"--password=a b\", \"-v\"]", "args = [\"--password=(secret)\", \"-v\"]"),
    ("WANDB_API_KEY=abc DB_PASSWORD:abc", "WANDB_API_KEY=(secret) DB_PASSWORD:(secret)"),
    ("sh -c \"PGPASSWORD=abc\"", "sh -c \"PGPASSWORD=(secret)\""),
    ("sh -c \"PGPASSWORD=abc psql\" x", "sh -c \"PGPASSWORD=(secret)\" x"),
    ("password=a\\ b c", "password=(secret) c"),
    ("password='a'b c", "password=(secret) c"),
    ("curl -u admin:S3cr3tt https://h", "curl -u admin:(secret) https://h"),
    ("curl -u 'admin:S3c r3tt' x", "curl -u 'admin:(secret)' x"),
    ("curl -uadmin:S3cr3tt x", "curl -uadmin:(secret) x"),
    ("curl --user=admin:S3cr3tt --proxy-user a:b", "curl --user=admin:(secret) --proxy-user a:(secret)"),
    // HTTP headers.
    ("Authorization: Basic YWxhZGRpbjpvcGVu", "Authorization: (secret)"),
    ("Proxy-Authorization: Digest a=1, b=2\nnext", "Proxy-Authorization: (secret)\nnext"),
    ("curl -H 'Authorization: Bearer abc' x", "curl -H 'Authorization: (secret)' x"),
    ("curl -H \"X-Api-Key: abc\" x", "curl -H \"X-Api-Key: (secret)\" x"),
    ("{\"Authorization\": \"Basic abc\", \"a\": 1}", "{\"Authorization\": \"(secret)\", \"a\": 1}"),
    ("with Bearer abc.def now", "with Bearer (secret) now"),
    // URLs.
    ("https://u:pw9pw9@host/x", "https://(secret)@host/x"),
    ("dsn \"postgres://u:p@w@host:5432/db\"", "dsn \"postgres://(secret)@host:5432/db\""),
    ("https://u:p/w@host", "https://(secret)@host"),
    ("git clone https://t0k3n@host/x", "git clone https://(secret)@host/x"),
    ("https://host/x?token=abc&a=1", "https://host/x?token=(secret)"),
    // Tokens of services.
    ("a eyJhbGciOiJI.eyJzdWIiOiIx.c2ln-X_ b", "a (secret) b"),
    ("ghp_0123456789abcdef", "(secret)"),
    ("github_pat_0123456789_abcdef", "(secret)"),
    ("[AKIAIOSFODNN7EXAMPLE]", "[(secret)]"),
    ("sk-0123456789abcdef", "(secret)"),
    ("sk-proj-0123456789_abcdef", "(secret)"),
    ("hf_abcdefghijklmnopqrst,", "(secret),"),
    ("x=glpat-0123456789", "x=(secret)"),
    ("xoxb-0123-4567-abc", "(secret)"),
    ("nvapi-0123456789ab", "(secret)"),
    // Private keys.
    ("a\n-----BEGIN RSA PRIVATE KEY-----\nMIIB+/8=\n-----END RSA PRIVATE KEY-----\nb", "a\n(secret)\nb"),
    ("-----BEGIN PRIVATE KEY-----\nMIIB\nAAAA=\nb = 1", "(secret)\nb = 1"),
    ("ssh_key = \"-----BEGIN PRIVATE KEY-----\nMIIB\nAAAA=\nb = 1", "ssh_key = \"(secret)\nb = 1"),
];

/// Texts without secrets, many of them from gpush.
const KEPT: &[&str] = &[
    "a token is granted",
    "the password of a user",
    "password",
    "password =",
    "password = \"\"\npath = \"/x\"",
    "password: null, token = false",
    "use_password = true",
    "# fail. pass: the job runs without a lease.",
    "unknown key `driver.reed_ms`",
    "key = \"driver.read_ms\"",
    "{\"key\": \"driver.read_ms\", \"pending_keys\": [\"log.level\"]}",
    "--tokenizer=gpt2 tokenizer: gpt2",
    "bypass=1 compass: 2 monkey=3 hotkeys: 4",
    "gpushd::token::lock: waits",
    "GPU-5d1b2c3a-0000-1111-2222-333344445555",
    "MIG-5d1b2c3a-0000-1111-2222-333344445555",
    "socket = \"/run/gpush/gpushd.sock\"",
    "admin_socket = \"/run/gpush/admin.sock\"",
    "control = \"/usr/bin/nvidia-cuda-mps-control\"",
    "journalctl -u gpushd -n 2000",
    "docker run -u 1000:1000 -u1000:1000 --user 1000 x",
    "gpushctl leases --user bob",
    "ssh://git@host/x git@host:x",
    "http://127.0.0.1:8080/x@y http://[::1]/x@y https://h/@a",
    "disk-0123456789abcdefgh task-0123456789abcdefgh",
    "sk-learn-something-or-other",
    "AKIA ghp_ sk- hf_transfer eyJ",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "2026-11-27T10:00:00+0000 n1 gpushd[9]: GPU 0: 7g.80gb@0 created in 1.2 s",
    "1g.10gb+me, 3g.40gb@4, op-9, L17, 60 %: 10 % left",
];

#[test]
fn planted_secrets_are_removed_even_with_names() {
    let redactor = Redactor::new(true);
    for (text, redacted) in PLANTED {
        assert_eq!(redactor.text(text), *redacted, "{text}");
        assert_eq!(redactor.text(redacted), *redacted, "a second time: {text}");
    }
}

#[test]
fn texts_without_secrets_are_kept() {
    for redactor in [redactor(), Redactor::new(true)] {
        for text in KEPT {
            assert_eq!(redactor.text(text), *text);
        }
    }
    assert_eq!(Redactor::new(true).text("pid 7 (alice, python)"), "pid 7 (alice, python)");
}

/// In a document, the name of a field and its value are different strings.
#[test]
fn fields_of_documents_with_secret_names_lose_their_values() {
    let mut document = json!({"password": "a b", "api_key": ["c"], "pin_token": 5, "uses_token": false, "secret": null,
        "key": "driver.read_ms", "reason": "password=hunter3SECRET", "list": ["Authorization: Basic abc"]});
    Redactor::new(true).document(&mut document);
    assert_eq!(
        document,
        json!({"password": "(secret)", "api_key": "(secret)", "pin_token": "(secret)", "uses_token": false,
            "secret": null, "key": "driver.read_ms", "reason": "password=(secret)", "list": ["Authorization: (secret)"]})
    );
}

/// A user name becomes a text with a colon, which must not look like `USER:PASSWORD`.
#[test]
fn user_name_after_an_option_is_not_a_secret() {
    assert_eq!(redactor().text("ssh -u alice -p"), "ssh -u uid:1000 -p");
    assert_eq!(redactor().text("curl -u alice:pw"), "curl -u uid:1000:(secret)");
}

/// Every position that the scanner computes must be between two characters.
#[test]
fn combinations_of_fragments_are_read() {
    let fragments = [
        "password",
        "--token",
        "-u",
        "-ué",
        "Authorization",
        "Bearer",
        "ghp_0123456789",
        "http://",
        "é:ü@",
        "=",
        ": ",
        "\"",
        "'",
        "\\\"",
        "\"\"\"",
        "\\",
        "[",
        "}",
        "ö",
        "…",
        " ",
        "\n",
        ",",
        "-----BEGIN PRIVATE KEY-----",
        "-----END é",
    ];
    let count = fragments.len();
    for number in (0..count.pow(4)).step_by(7) {
        let picked =
            [number, number / count, number / count.pow(2), number / count.pow(3)].map(|n| fragments[n % count]);
        let text = picked.concat() + "ß";
        let redacted = secrets::without_secrets(&text);
        assert!(redacted.len() <= text.len() + 4 * SECRET.len(), "{text}: {redacted}");
    }
}
