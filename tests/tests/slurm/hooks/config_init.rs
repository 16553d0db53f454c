//! A node with the config that `gpushctl config init --site slurm` writes.

use std::process::Command;

use gpush_api::MemberShare;
use gpush_tests::host::program;

use super::{Job, Node};

#[test]
fn job_gets_its_share_on_a_node_with_the_written_config() {
    let arguments = ["config", "init", "--site", "slurm", "--isolation", "shared", "--offline", "a30x4"];
    let output = Command::new(program("gpushctl")).args(arguments).output().expect("gpushctl can be started");
    assert!(output.status.success(), "{output:?}");
    let config = String::from_utf8(output.stdout).expect("UTF-8");
    assert!(config.lines().count() < 20 && config.contains("owner = \"slurm\""), "{config}");
    let node = Node::start("a30x4", &config);
    let job = Job::new(7).on("3").with("SLURM_JOB_COMMENT", "gpush:mps=25,memory=2G");
    node.prolog(&job);
    assert!(matches!(node.granted(7).members[0].share, MemberShare::Mps { .. }));
    node.epilog(&job);
}
