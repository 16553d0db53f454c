//! Tests that gpushd can load the configs that `gpushctl config init` writes, and can grant a lease with them.

use gpush_tests::{
    agent::{Agent, Setup, real_layout},
    host::Host,
};

use crate::verbs::done;

/// Writes the config of a site over the config of a running gpushd, and applies it.
fn applied(host: &Host, arguments: &[&str]) -> Agent {
    let agent = Setup::on(host).config("").start();
    let text = done(&agent, &[&["config", "init"], arguments].concat());
    assert!(text.lines().count() < 20, "{text}");
    agent.write_config(&text);
    done(&agent, &["config", "check", &host.scratch("gpushd.toml").display().to_string()]);
    done(&agent, &["apply", "--yes"]);
    agent
}

/// Returns what the first word of a command prints in a new share.
fn run(agent: &Agent, variable: &str) -> String {
    done(agent, &["run", "--for", "1h", "--", "/usr/bin/printenv", variable]).trim().to_owned()
}

#[test]
fn config_for_a_lab_with_mig_gives_each_user_one_device() {
    let host = Host::up("[[gpu]]\nmodel = \"a100-80\"\n");
    let agent = applied(&host, &["--site", "lab"]);
    assert_eq!(real_layout(&host, 0).len(), 7);
    assert!(run(&agent, "CUDA_VISIBLE_DEVICES").starts_with("MIG-"));
    done(&agent, &["lease", "request", "--for", "1h"]);
    let quota = done(&agent, &["quota"]);
    assert!(quota.contains("leases"), "{quota}");
}

#[test]
fn config_for_a_lab_or_services_without_mig_shares_through_mps() {
    for site in ["lab", "inference"] {
        let host = Host::up("[[gpu]]\nmodel = \"l4\"\ncount = 2\n");
        let agent = applied(&host, &["--site", site, "--isolation", "shared"]);
        agent.await_that("the daemons serve", || done(&agent, &["mps", "list"]).matches("ready").count() == 2);
        assert!(!run(&agent, "CUDA_MPS_PIPE_DIRECTORY").is_empty(), "{site}");
    }
}
