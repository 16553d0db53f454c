use std::collections::BTreeSet;

use super::*;

/// All paths from the root: the answers, and the leaf.
const PATHS: [(&[(Question, TreeAnswer)], Leaf); 15] = {
    use Question::{
        Bottleneck, BoundedMemory as Bounded, Driver, Isolation, MigSupport, SharedFaults, SoftCompute, Workload,
    };
    use TreeAnswer::{Hard, Latency, Managed, No, OneTenant, Own, Shared, Throughput, Yes};
    [
        (&[(Isolation, OneTenant)], Leaf::NoSharing),
        (&[(Isolation, Hard), (MigSupport, Yes)], Leaf::Mig),
        (&[(Isolation, Hard), (MigSupport, No)], Leaf::NoSharing),
        (&[(Isolation, Shared), (Workload, Throughput), (Driver, Managed)], Leaf::ManagedTimeslice),
        (&[(Isolation, Shared), (Workload, Throughput), (Driver, Own), (Bottleneck, No)], Leaf::Timeslice),
        (
            &[(Isolation, Shared), (Workload, Throughput), (Driver, Own), (Bottleneck, Yes), (SharedFaults, Yes)],
            Leaf::Mps,
        ),
        (
            &[(Isolation, Shared), (Workload, Throughput), (Driver, Own), (Bottleneck, Yes), (SharedFaults, No)],
            Leaf::Timeslice,
        ),
        (&[(Isolation, Shared), (Workload, Latency), (Bounded, Yes), (SoftCompute, Yes)], Leaf::Hami),
        (&[(Isolation, Shared), (Workload, Latency), (Bounded, Yes), (SoftCompute, No), (MigSupport, Yes)], Leaf::Mig),
        (
            &[(Isolation, Shared), (Workload, Latency), (Bounded, Yes), (SoftCompute, No), (MigSupport, No)],
            Leaf::NoSharing,
        ),
        (&[(Isolation, Shared), (Workload, Latency), (Bounded, No), (Driver, Managed)], Leaf::ManagedTimeslice),
        (&[(Isolation, Shared), (Workload, Latency), (Bounded, No), (Driver, Own), (Bottleneck, No)], Leaf::Timeslice),
        (
            &[
                (Isolation, Shared),
                (Workload, Latency),
                (Bounded, No),
                (Driver, Own),
                (Bottleneck, Yes),
                (SharedFaults, Yes),
            ],
            Leaf::Mps,
        ),
        (
            &[
                (Isolation, Shared),
                (Workload, Latency),
                (Bounded, No),
                (Driver, Own),
                (Bottleneck, Yes),
                (SharedFaults, No),
            ],
            Leaf::Timeslice,
        ),
        // A question that is not on the path does not change the answer.
        (&[(Isolation, OneTenant), (MigSupport, Yes), (SharedFaults, Yes)], Leaf::NoSharing),
    ]
};

#[test]
fn each_path_ends_in_its_leaf() {
    for (answers, expected) in PATHS {
        let given = |question| {
            let found = answers.iter().find(|(asked, _)| *asked == question);
            found.unwrap_or_else(|| panic!("{answers:?} does not answer {question:?}")).1
        };
        let (steps, leaf) = walk(given);
        assert_eq!(leaf, expected, "{answers:?}");
        let asked: Vec<Question> = steps.iter().map(|step| step.question).collect();
        assert!(answers.iter().map(|(question, _)| *question).collect::<Vec<_>>().starts_with(&asked), "{asked:?}");
    }
}

/// Counts the paths of the tree, so that a new path needs a new case above.
#[test]
fn cases_cover_each_path_of_the_tree() {
    fn follow(node: &Node, path: &[(Question, TreeAnswer)], found: &mut BTreeSet<Vec<(Question, TreeAnswer)>>) {
        for branch in node.branches {
            let path = [path, &[(node.question, branch.answer)]].concat();
            match branch.next {
                Next::Ask(next) => follow(next.node(), &path, found),
                Next::Leaf(_) => drop(found.insert(path)),
            }
        }
    }
    let mut paths = BTreeSet::new();
    follow(&TREE[0], &[], &mut paths);
    let cases: BTreeSet<Vec<_>> = PATHS.iter().take(14).map(|(answers, _)| answers.to_vec()).collect();
    assert_eq!(cases, paths);
}

#[test]
fn each_node_is_found_by_its_question() {
    for (position, node) in TREE.iter().enumerate() {
        assert_eq!(node.question.number(), position + 1);
        assert_eq!(node.question.node(), node);
        assert!(node.branches.len() >= 2);
    }
}

#[test]
fn each_leaf_ends_a_path() {
    let leaves: BTreeSet<Leaf> = PATHS.iter().map(|(_, leaf)| *leaf).collect();
    assert_eq!(leaves, Leaf::ALL.into_iter().collect());
}
