use crate::config::Config;

/// Returns the hints for a config.
fn hints(text: &str) -> Vec<String> {
    let errors = Config::parse(text, "config.toml").expect_err(text);
    errors.located().into_iter().map(|place| place.hint).collect()
}

/// Checks that a line of a table has exactly one error, with this hint.
fn check(header: &str, cases: &[(&str, &str)]) {
    for (line, hint) in cases {
        assert_eq!(hints(&format!("{header}\n{line}\n")), [*hint], "{header} {line}");
    }
}

#[test]
fn number_of_the_wrong_type_keeps_its_value() {
    check(
        "[[quota]]\neverybody = true",
        &[
            ("leases = \"7\"", "write leases = 7"),
            ("waiting = \"3\"", "write waiting = 3"),
            ("waiting = 3.0", "write waiting = 3"),
            ("mps_percentage = \"70%\"", "write mps_percentage = 70"),
            ("leases = \"a few\"", "write a whole number from 0 to 10000"),
        ],
    );
    check("[limits]", &[("changes_burst = \"100\"", "write changes_burst = 100")]);
    check(
        "[health]",
        &[
            ("cordon_xids = \"79\"", "write cordon_xids = [79]"),
            ("cordon_xids = 48", "write cordon_xids = [48]"),
            ("cordon_xids = \"79, 48\"", "write cordon_xids = [79, 48]"),
            ("cordon_xids = [\"79\", 48]", "write cordon_xids = [79, 48]"),
        ],
    );
    check(
        "[[gpu]]\nmatch = \"0\"\nmode = \"timeslice\"",
        &[
            ("timeslice = { replicas = \"8\" }", "write replicas = 8"),
            ("timeslice = 4", "write timeslice = { replicas = 4 }"),
        ],
    );
    check(
        "[[gpu]]\nmatch = \"0\"\nmode = \"mps\"",
        &[
            ("mps = { max_clients = \"16\" }", "write max_clients = 16"),
            ("mps = { total_percentage = \"200%\" }", "write total_percentage = 200"),
            ("mps = { total_percentage = 1.5 }", "write total_percentage = 150"),
            ("mps = 20", "write mps = { percentage = 20 }"),
        ],
    );
}

/// Fault: the hint for `"no"` was `true`.
#[test]
fn flag_of_the_wrong_type_keeps_its_meaning() {
    check(
        "",
        &[
            ("auto_reconcile = \"no\"", "write auto_reconcile = false"),
            ("auto_reconcile = 0", "write auto_reconcile = false"),
            ("auto_reconcile = \"on\"", "write auto_reconcile = true"),
            ("auto_reconcile = 7", "write auto_reconcile = true or auto_reconcile = false"),
        ],
    );
}

#[test]
fn memory_of_the_wrong_form_keeps_its_amount() {
    let bare = "add the unit that you mean: memory = \"10G\" for GiB, or \"10M\" for MiB";
    check(
        "[[quota]]\neverybody = true",
        &[
            ("memory = 10", bare),
            ("memory = 81920", "write memory = \"81920M\""),
            ("memory = 8589934592", "write memory = \"8192M\""),
            ("memory = \"1.5G\"", "write memory = \"1536M\""),
        ],
    );
    check(
        "[[gpu]]\nmatch = \"0\"\nmode = \"mps\"\n[gpu.mps]",
        &[
            ("memory = 10", bare),
            ("memory = 16384", "write memory = \"16384M\""),
            ("memory = \"10000\"", "write memory = \"10000M\""),
            ("memory = \"0.5G\"", "write memory = \"512M\""),
            ("memory = \"2.5 GiB\"", "write memory = \"2560M\""),
            ("memory = \"8.5G\"", "write memory = \"8704M\""),
        ],
    );
}

#[test]
fn duration_without_a_unit_is_refused_with_the_units() {
    let longest = |n: &str| format!("add the unit that you mean: longest = \"{n}h\", \"{n}m\" or \"{n}s\"");
    check(
        "[[quota]]\neverybody = true",
        &[
            ("longest = 4", &longest("4")),
            ("longest = 3600", &longest("3600")),
            ("longest = \"4\"", &longest("4")),
            ("longest = \"90\"", &longest("90")),
            ("longest = \"4H\"", "write longest = \"4h\""),
        ],
    );
    let before = "add the unit that you mean: before = [\"15m\", \"2m\"] or [\"15s\", \"2s\"]";
    check("[notify]", &[("before = [15, 2]", before), ("before = [\"15\", \"2\"]", before)]);
    check("[health]", &[("poll = 60", "write poll = \"60s\""), ("poll = \"5M\"", "write poll = \"5m\"")]);
}

/// Fault: a copied hint exempted uid 1000 and nvtop from the rules.
#[test]
fn allowed_process_never_becomes_another_process() {
    check(
        "[processes]",
        &[
            ("allow = [{ uid = \"990\" }]", "write uid = 990"),
            ("allow = [\"/usr/bin/dcgm\"]", "write { exe = \"/usr/bin/dcgm\" } for this entry"),
            ("allow = [990]", "write { uid = 990 } for this entry"),
            ("allow = \"/usr/bin/dcgm\"", "write allow = [{ exe = \"/usr/bin/dcgm\" }]"),
        ],
    );
    for line in ["[{ uid = \"dcgm\" }]", "[{}]", "[\"dcgm\"]", "true", "[{ uid = true }]", "[{ exe = 5 }]"] {
        let hints = hints(&format!("[processes]\nallow = {line}\n")).concat();
        assert!(!hints.contains("1000"), "{line}: {hints}");
    }
}

#[test]
fn lease_and_users_of_the_wrong_type_keep_their_meaning() {
    check(
        "[[gpu]]\nmatch = \"0\"\nmode = \"mps\"",
        &[
            ("lease = true", "write lease = \"required\""),
            ("lease = false", "write lease = \"optional\""),
            (
                "mps = { users = 8 }",
                "write users = \"many\"; to limit the clients of the daemon, write max_clients = 8",
            ),
            ("mps = { users = 1 }", "write users = \"one\""),
            ("mps = { users = true }", "write users = \"one\" or \"many\""),
        ],
    );
}

#[test]
fn percentage_below_1_is_read_as_a_fraction() {
    check(
        "[[gpu]]\nmatch = \"0\"\nmode = \"mps\"\n[gpu.mps]",
        &[
            ("percentage = 0.25", "write percentage = 25 for 25 % of the GPU"),
            ("percentage = 0.2", "write percentage = 20 for 20 % of the GPU"),
            ("percentage = \"0.125\"", "write percentage = 12.5 for 12.5 % of the GPU"),
        ],
    );
}

#[test]
fn lists_of_the_wrong_form_keep_their_items() {
    check(
        "[[quota]]",
        &[
            ("groups = [\"students\", 1000]", "write groups = [\"students\", \"1000\"]"),
            ("groups = [\"@students\"]", "write the name of the group without @ or %: `students`"),
            ("groups = 1000", "write groups = [\"1000\"]"),
        ],
    );
    check(
        "[mode_change]",
        &[
            ("reset_together = [[\"0\", \"1\"], [\"2\", \"3\"]]", "write reset_together = [\"0-1\", \"2-3\"]"),
            ("reset_together = [[0, 1, 2, 3], [4, 5]]", "write reset_together = [\"0-3\", \"4-5\"]"),
        ],
    );
    check(
        "[[gpu]]\nmatch = \"0\"\nmode = \"mig\"",
        &[("layout = { \"1g.10gb\" = 7, \"3g.40gb\" = 1 }", "write layout = [\"1g.10gb*7\", \"3g.40gb\"]")],
    );
}

#[test]
fn default_of_a_quota_keeps_its_duration() {
    check(
        "[[quota]]\neverybody = true",
        &[
            ("default = \"mig=1g.10gb for 4h\"", "write default = \"mig=1g.10gb,for=4h\""),
            ("default = \"mps=25 memory=8G for=4H\"", "write default = \"mps=25,memory=8g,for=4h\""),
        ],
    );
}

/// Fault: the hint for a number without a unit named durations that the key does not accept.
#[test]
fn number_without_a_unit_gets_units_that_the_key_accepts() {
    check(
        "[slurm]",
        &[
            ("deadline = \"20\"", "add the unit of time that you mean: deadline = \"20s\" or \"20m\""),
            ("deadline = \"90\"", "add the unit of time: deadline = \"90s\""),
            ("deadline = \"9999\"", "write whole seconds from \"1s\" to \"1h\""),
        ],
    );
}
