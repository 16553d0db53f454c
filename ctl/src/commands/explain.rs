//! `gpushctl explain`.

use gpush_core::isolation::{Aspect, SOURCES, Source, TABLE};
use serde::Serialize;

use super::mig_history;
use crate::{
    args::{Global, Topic},
    exit::Outcome,
    output::Output,
    render::isolation,
};

/// The output of `gpushctl explain isolation --json`.
#[derive(Serialize)]
pub(super) struct Isolation {
    aspects: [Aspect; 5],
    sources: [Source; 4],
}

impl Isolation {
    pub(super) const ALL: Self = Self { aspects: TABLE, sources: SOURCES };
}

pub(super) fn run(global: &Global, topic: Topic, out: &Output) -> Outcome {
    match topic {
        Topic::Isolation => {
            out.show(&Isolation::ALL, isolation::table)?;
            Ok(0)
        }
        Topic::MigDevice(uuid) => super::ask(global, async |client| mig_history::run(client, &uuid, out).await),
    }
}
