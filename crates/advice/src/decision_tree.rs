//! The decision tree: eight questions as data, and the path through them.
//!
//! ```text
//! 1 isolation ── one tenant ──────────────────────────────► no sharing
//!   │ hard ─────► 2 MIG ── yes ──► MIG
//!   │               └───── no ───► no sharing
//!   └ shared ───► 3 workload ── throughput ────────────┐
//!                   └ latency ─► 4 bound memory ─ no ──┴► 5 driver ── managed ► time-slicing
//!                                  └ yes ► 7 soft compute   └ own ► 6 bottleneck ── no ► time-slicing
//!                                     yes ► HAMi               └ yes ► 8 shared faults
//!                                     no  ► 2                            yes ► MPS · no ► time-slicing
//! ```

use serde::{Serialize, Serializer};

use crate::leaf::Leaf;

/// A question. Its number is its position in [`TREE`], from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Question {
    /// Must tenants be isolated in hardware?
    Isolation,
    /// Does the GPU support MIG?
    MigSupport,
    /// Does throughput or latency matter?
    Workload,
    /// Must the memory of each tenant be bounded?
    BoundedMemory,
    /// Who controls the driver?
    Driver,
    /// Are the multiprocessors the bottleneck?
    Bottleneck,
    /// Do the tenants accept a soft limit of compute?
    SoftCompute,
    /// Do the tenants accept each other's faults?
    SharedFaults,
}

/// An answer to a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TreeAnswer {
    /// There is one tenant.
    OneTenant,
    /// Hard isolation.
    Hard,
    /// The tenants may share.
    Shared,
    /// Throughput matters.
    Throughput,
    /// Latency matters.
    Latency,
    /// The administrators of the host control the driver.
    Own,
    /// Another party controls the driver.
    Managed,
    /// Yes.
    Yes,
    /// No.
    No,
}

/// The step after an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Another question.
    Ask(Question),
    /// The end of the path.
    Leaf(Leaf),
}

/// One answer to a question, and the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Branch {
    /// The answer.
    pub answer: TreeAnswer,
    /// The answer as a clause that gives a reason.
    pub text: &'static str,
    /// The next step.
    pub next: Next,
}

/// A question with its answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Node {
    /// The question.
    pub question: Question,
    /// The question as text.
    pub text: &'static str,
    /// All answers.
    pub branches: &'static [Branch],
}

const fn branch(answer: TreeAnswer, text: &'static str, next: Next) -> Branch {
    Branch { answer, text, next }
}

/// The tree. Its root is the first node.
pub const TREE: [Node; 8] = [
    Node {
        question: Question::Isolation,
        text: "Must tenants be isolated in hardware?",
        branches: &[
            branch(TreeAnswer::OneTenant, "there is one tenant", Next::Leaf(Leaf::NoSharing)),
            branch(TreeAnswer::Hard, "tenants must be isolated in hardware", Next::Ask(Question::MigSupport)),
            branch(TreeAnswer::Shared, "the tenants trust each other", Next::Ask(Question::Workload)),
        ],
    },
    Node {
        question: Question::MigSupport,
        text: "Does the GPU support MIG?",
        branches: &[
            branch(TreeAnswer::Yes, "the GPU supports MIG", Next::Leaf(Leaf::Mig)),
            branch(
                TreeAnswer::No,
                "the GPU does not support MIG, and no software gives the same guarantee",
                Next::Leaf(Leaf::NoSharing),
            ),
        ],
    },
    Node {
        question: Question::Workload,
        text: "Does throughput or latency matter?",
        branches: &[
            branch(TreeAnswer::Throughput, "throughput matters", Next::Ask(Question::Driver)),
            branch(TreeAnswer::Latency, "latency matters", Next::Ask(Question::BoundedMemory)),
        ],
    },
    Node {
        question: Question::BoundedMemory,
        text: "Must the memory of each tenant be bounded?",
        branches: &[
            branch(TreeAnswer::Yes, "the memory of each tenant must be bounded", Next::Ask(Question::SoftCompute)),
            branch(TreeAnswer::No, "some jitter is acceptable", Next::Ask(Question::Driver)),
        ],
    },
    Node {
        question: Question::Driver,
        text: "Who controls the driver?",
        branches: &[
            branch(TreeAnswer::Own, "you control the driver", Next::Ask(Question::Bottleneck)),
            branch(TreeAnswer::Managed, "another party manages the driver", Next::Leaf(Leaf::ManagedTimeslice)),
        ],
    },
    Node {
        question: Question::Bottleneck,
        text: "Do programs leave multiprocessors idle, as small kernels and batched inference do?",
        branches: &[
            branch(TreeAnswer::Yes, "single programs leave multiprocessors idle", Next::Ask(Question::SharedFaults)),
            branch(TreeAnswer::No, "one program at a time keeps the GPU busy", Next::Leaf(Leaf::Timeslice)),
        ],
    },
    Node {
        question: Question::SoftCompute,
        text: "Do the tenants accept a limit of compute that is not exact?",
        branches: &[
            branch(TreeAnswer::Yes, "a soft limit of compute is acceptable", Next::Leaf(Leaf::Hami)),
            branch(TreeAnswer::No, "the limit of compute must be exact", Next::Ask(Question::MigSupport)),
        ],
    },
    Node {
        question: Question::SharedFaults,
        text: "May a fault of one tenant end the programs of others?",
        branches: &[
            branch(TreeAnswer::Yes, "the tenants accept each other's faults", Next::Leaf(Leaf::Mps)),
            branch(TreeAnswer::No, "a fault must not end the programs of others", Next::Leaf(Leaf::Timeslice)),
        ],
    },
];

/// A question on the path, with its answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct PathStep {
    /// The question; its number in JSON.
    #[serde(rename = "question_number")]
    pub question: Question,
    /// The answer as a clause.
    #[serde(rename = "reason")]
    pub text: &'static str,
}

impl Question {
    /// Returns the node of the question.
    #[must_use]
    pub fn node(self) -> &'static Node {
        match self {
            Self::Isolation => &TREE[0],
            Self::MigSupport => &TREE[1],
            Self::Workload => &TREE[2],
            Self::BoundedMemory => &TREE[3],
            Self::Driver => &TREE[4],
            Self::Bottleneck => &TREE[5],
            Self::SoftCompute => &TREE[6],
            Self::SharedFaults => &TREE[7],
        }
    }

    /// Returns the number of the question, from 1.
    #[must_use]
    pub fn number(self) -> usize {
        TREE.iter().position(|node| node.question == self).map_or(0, |position| position + 1)
    }
}

impl Serialize for Question {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(self.number() as u64)
    }
}

/// Follows the tree from its root. `answer` answers each question on the path; an answer that the question does not
/// have counts as its last answer.
#[must_use]
pub fn walk(answer: impl Fn(Question) -> TreeAnswer) -> (Vec<PathStep>, Leaf) {
    let mut steps = Vec::new();
    let mut node = &TREE[0];
    loop {
        let given = answer(node.question);
        let fallback = &node.branches[node.branches.len() - 1];
        let branch = node.branches.iter().find(|branch| branch.answer == given).unwrap_or(fallback);
        steps.push(PathStep { question: node.question, text: branch.text });
        match branch.next {
            Next::Ask(next) => node = next.node(),
            Next::Leaf(leaf) => return (steps, leaf),
        }
    }
}

#[cfg(test)]
mod tests;
