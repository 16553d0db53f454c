//! Invalid config files, each with the complete diagnostic that users see.

use std::fmt::Write as _;

use super::super::*;

const RULE: &str = "[[gpu]]\nmatch = [\"all\"]\nmode = \"mig\"\n";

/// Returns for each case: a name of the mistake, the file, and its number of problems.
fn corpus() -> Vec<(&'static str, String, usize)> {
    let rule = |rest: &str| format!("{RULE}{rest}\n");
    let own = str::to_owned;
    let turns =
        |mode: &str, lines: &str| format!("[[gpu]]\nmatch = [\"0\"]\nmode = \"{mode}\"\n[gpu.timeslice]\n{lines}\n");
    let shared = |mode: &str, line: &str| {
        let uuid = line.bytes().map(u32::from).sum::<u32>();
        format!("[[gpu]]\nmatch = [\"GPU-{uuid:08x}\"]\nmode = \"{mode}\"\n[gpu.mps]\n{line}\n")
    };
    vec![
        // Mistakes in the TOML syntax
        ("not TOML", own("hello world\n"), 1),
        ("unquoted string", own("[log]\nlevel = debug\n"), 1),
        ("unclosed string", own("[driver]\nlibrary = \"libnvidia-ml.so.1\n"), 1),
        ("unclosed list", own("[access]\nadmin_groups = [\"a\"\n"), 1),
        ("two values", own("auto_reconcile = true false\n"), 1),
        ("path without quotes", own("[driver]\nlibrary = /opt/libnvidia-ml.so.1\n"), 1),
        ("missing value", own("auto_reconcile =\n"), 1),
        ("duplicate key", own("[limits]\nchanges_burst = 100\nchanges_per_second = 5\nchanges_burst = 200\n"), 1),
        ("duplicate table", own("[log]\nlevel = \"info\"\n\n[driver]\n\n[log]\nlevel = \"warn\"\n"), 2),
        ("two syntax errors", own("auto_reconcile = yes\n[log]\nlevel = info\n"), 2),
        // Mistakes in keys
        ("unknown key, near", own("[driver]\nlibary = \"libnvidia-ml.so.1\"\n"), 1),
        ("unknown key, far", own("[driver]\ncolour = \"red\"\n"), 1),
        ("key of another table", own("[api]\nlibrary = \"libnvidia-ml.so.1\"\n"), 1),
        ("setting at the top", own("cordon_xids = [79]\n"), 1),
        ("unknown table, near", own("[drivers]\nlibrary = \"x\"\n"), 1),
        ("unknown table, far", own("[metrics]\nport = 1\n"), 1),
        ("key in a table below", own("[log]\nlevel = \"info\"\nauto_reconcile = true\n"), 1),
        ("rule with one bracket", own("[gpu]\nmatch = [\"all\"]\nmode = \"mig\"\n"), 1),
        ("unknown key of a rule", rule("layuot = \"none\""), 1),
        ("unknown keys of a rule", own("[[gpu]]\nmatches = [\"0\"]\nmdoe = \"mig\"\n"), 2),
        ("rule with gpus in place of match", own("[[gpu]]\ngpus = [\"0\"]\nmode = \"unmanaged\"\n"), 1),
        (
            "rule with users of a daemon outside the mps table",
            own("[[gpu]]\nmatch = \"0\"\nmode = \"mps\"\nusers = \"many\"\n"),
            1,
        ),
        // Mistakes in types
        ("flag as a string", own("auto_reconcile = \"yes\"\n"), 1),
        ("number as a string", own("[limits]\nchanges_burst = \"10\"\n"), 1),
        ("number with a fraction", own("[limits]\nchanges_burst = 1.5\n"), 1),
        ("number too small", own("[limits]\nchanges_burst = 0\n"), 1),
        ("number negative", own("[limits]\nchanges_burst = -1\n"), 1),
        ("number too large", own("[limits]\nchanges_burst = 99999999999999999999999\n"), 1),
        ("string as a number", own("[driver]\nlibrary = 1\n"), 1),
        ("list as a string", own("[access]\nadmin_groups = \"wheel\"\n"), 1),
        ("list of another type", own("[access]\nadmin_groups = [\"wheel\", 10]\n"), 1),
        ("table as a value", own("driver = \"libnvidia-ml.so.1\"\n"), 1),
        ("date", own("[log]\nlevel = 2026-01-01\n"), 1),
        // Mistakes in values
        ("log level, near", own("[log]\nlevel = \"warning\"\n"), 1),
        ("log level, far", own("[log]\nlevel = \"loud\"\n"), 1),
        ("library empty", own("[driver]\nlibrary = \"\"\n"), 1),
        ("library relative", own("[driver]\nlibrary = \"lib/libnvidia-ml.so.1\"\n"), 1),
        ("library with a newline", own("[driver]\nlibrary = \"lib\\nnvidia\"\n"), 1),
        ("hook relative", own("[mode_change]\nbefore = \"hooks/before\"\n"), 1),
        ("not a service", own("[mode_change]\nservices = [\"--now\", \"a b\", \"gpushd\"]\n"), 3),
        ("not GPUs", own("[mode_change]\nreset_together = [\"0-1\", \"4-2\"]\n"), 1),
        ("admin socket relative", own("[api]\nadmin_socket = \"admin.sock\"\n"), 1),
        ("group with a blank", own("[access]\nadmin_groups = [\"gpu users\"]\n"), 1),
        ("group twice", own("[access]\nadmin_groups = [\"a\", \"b\", \"a\"]\n"), 1),
        // Mistakes in layouts
        ("layout empty list", own("[layouts]\ntrain = []\n"), 1),
        ("layout empty string", own("[layouts]\ntrain = \"\"\n"), 1),
        ("layout profile", own("[layouts]\ntrain = [\"2g.20gb\", \"3g40gb\"]\n"), 1),
        ("layout in one string", own("[layouts]\ntrain = \"2g.20gb, 1g.10gb x2, 3g.40gb*0\"\n"), 2),
        ("layout string with escapes", own("[layouts]\ntrain = [\"3\\u0067x.40gb\"]\n"), 1),
        ("layout with umlauts before", own("[layouts]\ntrain = [\"\u{fc}\u{fc}\", \"3g.40gb:x\"]\n"), 2),
        ("layout of numbers", own("[layouts]\ntrain = [3, 2]\n"), 2),
        ("layout a number", own("[layouts]\ntrain = 7\n"), 1),
        ("layout dynamic", own("[layouts]\ntrain = [\"dynamic\"]\n"), 1),
        ("layout just none", own("[layouts]\nempty = \"none\"\n"), 1),
        ("layout shared otherwise", own("[layouts]\ntrain = [\"3g.40gb\", \"2g.20gb:mpx\"]\n"), 1),
        ("layout name reserved", own("[layouts]\nnone = [\"3g.40gb\"]\ndynamic = [\"3g.40gb\"]\n"), 2),
        ("layout name like an entry", own("[layouts]\n\"3g.40gb\" = [\"3g.40gb\"]\n"), 1),
        // Mistakes in rules
        ("rule without match", own("[[gpu]]\nmode = \"unmanaged\"\n"), 1),
        ("rule without mode", own("[[gpu]]\nmatch = [\"0\"]\n"), 1),
        ("rule without anything", own("[[gpu]]\n"), 2),
        ("rule with match a number", own("[[gpu]]\nmatch = 3\nmode = \"unmanaged\"\n"), 1),
        ("rule with match empty", own("[[gpu]]\nmatch = []\nmode = \"unmanaged\"\n"), 1),
        ("rule with match numbers", own("[[gpu]]\nmatch = [0, 1]\nmode = \"unmanaged\"\n"), 1),
        ("rule with garbage", own("[[gpu]]\nmatch = [\"GPU-zz\", \"3-1\"]\nmode = \"unmanaged\"\n"), 2),
        ("rule with a comma", own("[[gpu]]\nmatch = [\"0,2\"]\nmode = \"unmanaged\"\n"), 1),
        ("rule with a MIG device", own("[[gpu]]\nmatch = [\"MIG-1\"]\nmode = \"unmanaged\"\n"), 1),
        ("rule mode, near", own("[[gpu]]\nmatch = [\"0\"]\nmode = \"MIG\"\n"), 1),
        ("rule mode, far", own("[[gpu]]\nmatch = [\"0\"]\nmode = \"whatever\"\n"), 1),
        ("rule mode hami", own("[[gpu]]\nmatch = [\"0\"]\nmode = \"hami\"\n"), 1),
        ("rule mig without layout", rule(""), 1),
        ("rule layout without mig", own("[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\nlayout = \"none\"\n"), 1),
        (
            "rule layout unknown, near",
            format!("[layouts]\ntraining = [\"3g.40gb\"]\n{}", rule("layout = \"trainnig\"")),
            1,
        ),
        ("rule layout unknown, far", format!("[layouts]\ntraining = [\"3g.40gb\"]\n{}", rule("layout = \"half\"")), 1),
        ("rule layout, none there", rule("layout = \"training\""), 1),
        ("rule layout wrong elsewhere", format!("[layouts]\ntrain = [\"3g40gb\"]\n{}", rule("layout = \"train\"")), 1),
        ("rule layout profile as a string", rule("layout = \"3g40gb\""), 1),
        (
            "rule layout a name in a list",
            format!("[layouts]\ntrain = [\"3g.40gb\"]\n{}", rule("layout = [\"train\"]")),
            1,
        ),
        ("rule layout empty", rule("layout = []"), 1),
        ("rule layout true", rule("layout = true"), 1),
        (
            "same name twice",
            own(
                "[[gpu]]\nname = \"a\"\nmatch = [\"0\"]\nmode = \"unmanaged\"\n[[gpu]]\nname = \"a\"\nmatch = [\"1\"]\nmode = \"unmanaged\"\n",
            ),
            1,
        ),
        (
            "same selector twice",
            own(
                "[[gpu]]\nmatch = [\"0000:07:00.0\"]\nmode = \"unmanaged\"\n\n[[gpu]]\nmatch = [\"1\", \"07:00.0\"]\nmode = \"exclusive\"\n",
            ),
            1,
        ),
        ("same selector in one rule", own("[[gpu]]\nmatch = [\"*A100*\", \"*a100*\"]\nmode = \"unmanaged\"\n"), 1),
        (
            "never reached after all",
            own(
                "[[gpu]]\nmatch = [\"all\"]\nmode = \"unmanaged\"\n\n[[gpu]]\nmatch = [\"0\", \"1\"]\nmode = \"exclusive\"\n",
            ),
            1,
        ),
        (
            "never reached after a glob",
            own(
                "[[gpu]]\nmatch = [\"*\"]\nmode = \"unmanaged\"\n\n[[gpu]]\nmatch = [\"*A30*\"]\nmode = \"exclusive\"\n",
            ),
            1,
        ),
        (
            "index within two ranges",
            own(
                "[[gpu]]\nmatch = [\"0-1\", \"2-3\"]\nmode = \"unmanaged\"\n\n[[gpu]]\nmatch = [\"1-2\"]\nmode = \"exclusive\"\n",
            ),
            1,
        ),
        // Mistakes in MPS settings
        ("mps control daemon, relative", own("[mps]\ncontrol = \"mps-control\"\n"), 1),
        ("mps control daemon with a colon", own("[mps]\ncontrol = \"/a:b/nvidia-cuda-mps-control\"\n"), 1),
        ("mps flag", own("[mps]\nrestart_hung_with_clients = 1\n"), 1),
        ("former keys of driver and socket", own("[driver]\nread_ms = 1\n[api]\nsocket_mode = \"0660\"\n"), 2),
        (
            "former keys of mode changes",
            own("[mode_change]\nhook_s = 1\nreset_s = 1\nsystemctl = \"/bin/systemctl\"\n"),
            3,
        ),
        ("former keys of daemons", own("[mps]\nserver = \"/usr/bin/mps\"\nfailures = 5\nhealth_s = 15\n"), 3),
        ("former keys of Slurm", own("[slurm]\ndirectory = \"/run/jobs\"\ndeadline_s = 20\n"), 2),
        ("former keys of a rule", shared("mps", "memory_limit = \"8G\"\nshares_percent = 100"), 2),
        // Mistakes in durations
        ("durations as numbers", own("[health]\npoll = 60\n[mps]\nhealth = 1.5\n[processes]\ngrace = true\n"), 3),
        (
            "durations out of bounds",
            own("[health]\npoll = \"2d\"\n[mps]\nhealth = \"0s\"\n[processes]\ngrace = \"1.5s\"\n"),
            3,
        ),
        ("duration misspelt", own("[slurm]\ndeadline = \"20 secs!\"\n"), 1),
        ("mps settings at the top", own("[mps]\npercentage = 25\nhealthy = 1\n"), 2),
        ("mps percentages", [0, 101, -5].map(|n| shared("mps", &format!("percentage = {n}"))).concat(), 3),
        ("mps percentage nan", shared("mps", "percentage = nan"), 1),
        ("mps percentage inf", shared("mps", "percentage = inf"), 1),
        ("mps percentage too fine", shared("mps", "percentage = 33.37"), 1),
        ("mps percentage a text", shared("mps", "percentage = \"half\""), 1),
        ("mps percentage empty", shared("mps", "percentage = \"\""), 1),
        ("mps percentage true", shared("mps", "percentage = true"), 1),
        ("mps percentage huge", shared("mps", "percentage = 99999999999999999999"), 1),
        ("mps memory with a fraction", shared("mps", "memory = \"1.5G\""), 1),
        ("mps memory nothing", shared("mps", "memory = \"0M\""), 1),
        ("mps memory without unit", shared("mps", "memory = \"512\""), 1),
        ("mps memory a number", shared("mps", "memory = 0"), 1),
        ("mps memory too much", shared("mps", "memory = \"99999999G\""), 1),
        ("mps priority", shared("mps", "priority = \"low\""), 1),
        ("mps clients", shared("mps", "max_clients = 61"), 1),
        ("mps total percentage", shared("mps", "total_percentage = 0"), 1),
        ("mps users", shared("mps", "users = \"On\""), 1),
        ("mps compute mode", shared("mps", "compute_mode = \"prohibited\""), 1),
        ("mps key, near", shared("mps", "percent = 25"), 1),
        ("mps key, far", shared("mps", "colour = 25"), 1),
        ("mps no table", own("[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nmps = 25\n"), 1),
        ("mps key in the rule", own("[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\npercentage = 25\n"), 1),
        ("mps in mode exclusive", shared("exclusive", "percentage = 25"), 1),
        ("mps with a layout", own("[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nlayout = \"none\"\n"), 1),
        ("mps compute mode under MIG", rule("layout = \"2g.20gb:mps\"\nmps = { compute_mode = \"keep\" }"), 1),
        ("mps in a mode that is none", shared("mpx", "percentage = 0"), 2),
        // Mistakes in lease settings
        ("lease of a rule", rule("layout = \"none\"\nlease = \"needed\"\nat_end = \"kill\"\nowner = \"root\""), 3),
        ("enforced lease", rule("layout = \"none\"\nlease = \"enforce\"\nenforce_missing = \"allow\""), 2),
        ("enforce_missing without lease", rule("layout = \"none\"\nenforce_missing = \"grant\""), 1),
        ("enforce as a word", own("enforce = \"on\"\n"), 1),
        ("lease defaults", own("[defaults]\nlease = \"force\"\nat_end = \"kill\"\nmode = \"mps\"\n"), 3),
        (
            "lease in mode unmanaged",
            own("[[gpu]]\nmatch = [\"0\"]\nmode = \"unmanaged\"\nlease = \"required\"\nowner = \"slurm\"\n"),
            2,
        ),
        ("layout dynamic in a list", rule("layout = [\"dynamic\", \"1g.10gb\"]"), 1),
        ("layout dynamic in mode mps", own("[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\nlayout = \"dynamic\"\n"), 1),
        ("placement", own("[leases]\nplacement = \"packed\"\norder = 1\n"), 2),
        ("placement of a rule", rule("layout = \"none\"\nplacement = \"spread\""), 1),
        ("quota with one bracket", own("[quota]\nusers = [\"alice\"]\nleases = 2\n"), 1),
        ("quota of no user", own("[[quota]]\nleases = 2\n[[quota]]\neverybody = false\n[[quota]]\nusers = []\n"), 3),
        ("quota key, near", own("[[quota]]\nuser = [\"alice\"]\nlease = 2\n"), 2),
        ("quota names", own("[[quota]]\nusers = \"alice\"\ngroups = [\"gpu users\", \"*\"]\n"), 3),
        (
            "quota twice",
            own(
                "[[quota]]\nusers = [\"alice\", \"bob\"]\ngroups = [\"alice\"]\n[[quota]]\nusers = [\"bob\"]\n[[quota]]\neverybody = true\n[[quota]]\ngroups = [\"late\"]\n",
            ),
            2,
        ),
        ("quota kinds", own("[[quota]]\neverybody = true\nkinds = [\"mig\", \"gpu\", \"Whole\"]\n"), 2),
        ("quota kinds empty", own("[[quota]]\neverybody = true\nkinds = []\n"), 1),
        ("quota figures", own("[[quota]]\neverybody = true\nleases = -1\nwaiting = \"4\"\nmps_percentage = 0\n"), 3),
        (
            "quota memory",
            ["40", "1.5G", "0%", "101%", "1.2345 GPUs", "GPUs", "-1 GPU", "half"]
                .map(|memory| {
                    format!(
                        "[[quota]]\nusers = [\"u{}\"]\nmemory = \"{memory}\"\n",
                        memory.bytes().map(u32::from).sum::<u32>()
                    )
                })
                .concat(),
            8,
        ),
        (
            "quota durations",
            ["2 fortnights", "0s", "99999w", "1.5s"]
                .map(|longest| {
                    format!(
                        "[[quota]]\ngroups = [\"g{}\"]\nlongest = \"{longest}\"\n",
                        longest.bytes().map(u32::from).sum::<u32>()
                    )
                })
                .concat(),
            4,
        ),
        (
            "quota default",
            ["big", "for=4h", "mps=25,wait", "mig=1g.10gb,for=2 fortnights"]
                .map(|default| format!("[[quota]]\nusers = [\"u{}\"]\ndefault = \"{default}\"\n", default.len()))
                .concat(),
            4,
        ),
        (
            "quota default beyond the quota",
            [
                ("leases = 0", "whole"),
                ("kinds = [\"mig\", \"mps\"]", "whole"),
                ("longest = \"2h\"", "mig=1g.10gb,for=4h"),
                ("mps_percentage = 20", "mps=25"),
                ("memory = \"10G\"", "mig=2g.20gb"),
                ("memory = \"1G\"", "mps=25,memory=2G"),
            ]
            .iter()
            .enumerate()
            .map(|(n, (limit, default))| format!("[[quota]]\nusers = [\"u{n}\"]\n{limit}\ndefault = \"{default}\"\n"))
            .collect(),
            6,
        ),
        ("users of a rule, empty", rule("layout = \"none\"\nusers = []\ngroups = []"), 2),
        ("users of a rule, names", rule("layout = \"none\"\nusers = [\"*\"]\ngroups = [\"a b\"]"), 2),
        ("users of a rule of Slurm", rule("layout = \"none\"\nowner = \"slurm\"\nusers = [\"anna\"]"), 1),
        ("users of an unmanaged rule", own("[[gpu]]\nmatch = [\"0\"]\nmode = \"unmanaged\"\ngroups = [\"ml\"]\n"), 1),
        ("quota GPUs", own("[[quota]]\neverybody = true\ngpus = [\"3-1\", \"0,2\"]\n"), 2),
        ("quota GPUs empty", own("[[quota]]\neverybody = true\ngpus = []\n"), 1),
        // Mistakes in time-slicing settings
        ("turns, replicas of one process", turns("timeslice", "replicas = 2\ncompute_mode = \"exclusive_process\""), 1),
        (
            "turns, figures",
            turns(
                "timeslice",
                "replicas = 0\n[[gpu]]\nmatch = [\"2\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 1001 }",
            ),
            2,
        ),
        ("turns, level", turns("timeslice", "level = \"2\"\ncompute_mode = \"exclusive_thread\""), 2),
        ("turns, keys", turns("timeslice", "replica = 2\nslice_ms = 2\nmax_clients = 2"), 3),
        ("turns in mode mps", turns("mps", "replicas = 2"), 1),
        ("turns in mode mig", rule("layout = \"none\"\ntimeslice = { replicas = 2 }"), 1),
        ("turns are no table", own("[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = 4\n"), 1),
        ("mps in mode timeslice", shared("timeslice", "percentage = 25"), 1),
        // Mistakes in Slurm settings
        ("Slurm's hooks", own("[slurm]\nagent_down = \"drain\"\ndeadline = \"0s\"\nleftovers = true\n"), 3),
        // Mistakes in the settings about processes
        ("unleased processes", own("[processes]\nunleased = \"kill\"\ngrace = -1\n"), 2),
        ("allowed is no list", own("[processes]\nallow = \"/usr/bin/nvtop\"\n"), 1),
        ("allowed are no tables", own("[processes]\nallow = [\"/usr/bin/nvtop\", 1000]\n"), 2),
        ("entry without values", own("[processes]\nallow = [{}]\n"), 1),
        ("allowed by name", own("[processes]\nallow = [{ exe = \"nvtop\" }, { name = \"nvtop\" }]\n"), 2),
        ("allowed uid", own("[processes]\nallow = [{ uid = \"root\" }, { uid = 4294967295 }]\n"), 2),
        (
            "allowed twice",
            own("[processes]\nallow = [{ uid = 7 }, { exe = \"/a\", uid = 7 }, { exe = \"/a\" }, { uid = 7 }]\n"),
            1,
        ),
        // Files that test the form of the diagnostic
        ("tab and CRLF", own("[driver]\r\n\tlibary = \"x\"\r\n"), 1),
        ("a very long line", format!("[driver]\nlibrary = \"{}\", 1\n", "x".repeat(300)), 1),
        ("escape codes", own("\"\\u001b[31mred\" = 1\n"), 1),
        (
            "many at once",
            own(
                "colour = 1\n[log]\nlevel = 3\n[health]\npoll = 5\n[[gpu]]\nmatch = [\"x\u{fc}*\", \"-\"]\nmode = \"migg\"\nlayout = [\"1g10gb\"]\n",
            ),
            6,
        ),
    ]
}

#[test]
fn bad_configs_give_the_expected_messages() {
    let mut shown = String::new();
    let corpus = corpus();
    let mut miscounted = Vec::new();
    for (what, text, problems) in &corpus {
        let errors = Config::parse(text, "config.toml").expect_err(what);
        let _ = writeln!(shown, "### {what}\n{errors}");
        if errors.problems().len() != *problems {
            miscounted.push((what, errors.problems().len()));
        }
        for place in errors.located() {
            assert!(!place.hint.is_empty(), "{what}");
            assert!(place.line <= text.lines().count() + 1, "{what}");
        }
    }
    println!("{} wrong configs", corpus.len());
    insta::assert_snapshot!(shown);
    assert!(miscounted.is_empty(), "{miscounted:?}");
}

#[test]
fn file_that_is_not_utf8_is_refused() {
    let cases: &[(&str, &[u8])] = &[
        ("latin-1", b"# Gr\xfc\xdfe\n[driver]\nlibrary = \"libnvidia-ml.so.1\"\n"),
        ("third line", b"[driver]\n# fine\nlibrary = \"\xff\"\n"),
        ("UTF-16", b"\xff\xfe[\0l\0o\0g\0]\0"),
        ("an ELF file", b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0>\0\x01\0\0\0\xc0\xfe\n"),
        ("cut short", b"# \xe2\x82"),
        ("UTF-16 without a mark", b"[\0l\0o\0g\0]\0"),
        ("NUL for a value", b"auto_reconcile = \0\n"),
    ];
    let mut shown = String::new();
    for (what, bytes) in cases {
        let errors = Config::from_bytes(bytes, "config.toml").expect_err(what);
        let _ = writeln!(shown, "### {what}\n{errors}");
    }
    println!("{} files that are not UTF-8", cases.len());
    insta::assert_snapshot!(shown);
}

#[test]
fn file_that_is_too_large_is_refused() {
    let errors = Config::from_bytes(&vec![b'#'; MOST_BYTES + 1], "config.toml").unwrap_err();
    assert_eq!(
        errors.to_string(),
        "config.toml:1:1: the file has 1048577 bytes\n  = the limit is 1048576 bytes: check that this file is the config of \
         gpushd\n"
    );
}

#[test]
fn config_errors_become_one_api_error() {
    let text = "colour = 1\n[log]\nlevel = \"inof\"\n";
    let error = gpush_api::ApiError::from(&Config::parse(text, "/etc/gpush/config.toml").unwrap_err());
    assert_eq!(error.code, gpush_api::Code::ConfigInvalid);
    assert_eq!(error.message, "the config /etc/gpush/config.toml has 2 errors");
    assert_eq!(error.causes.len(), 2);
    assert!(error.causes[0].starts_with("/etc/gpush/config.toml:1:1: unknown key `colour`"), "{:?}", error.causes);
    assert!(error.hint.unwrap().contains("gpushctl config check /etc/gpush/config.toml"));
}
