//! The questions of `advise` on a terminal: those of the decision tree that the flags do not answer.

use std::str::FromStr;

use clap::ValueEnum;
use gpush_api::{ApiError, Code};
use gpush_core::quote::Quoted;

use crate::{
    args::{AdviseMechanismArgs, DriverName, IsolationName, WorkloadName, YesNo},
    exit::Failure,
};

/// Asks one question, and returns the answer; `None` if the input has ended.
type Ask<'a> = dyn FnMut(&str) -> Result<Option<String>, Failure> + 'a;

/// Returns the flags with the answers to all questions that matter. Questions off the path are not asked.
pub(super) fn complete(mut args: AdviseMechanismArgs, ask: &mut Ask<'_>) -> Result<AdviseMechanismArgs, Failure> {
    if args.tenants.is_none() {
        let tenants = asked(ask, "How many users, services or customers share the host? ", |text| {
            text.parse().ok().filter(|tenants| *tenants > 0)
        })?;
        args.tenants = Some(tenants);
    }
    let is_alone = args.tenants == Some(1);
    if args.isolation.is_none() && !is_alone {
        let question = "Must tenants be isolated in hardware (hard), or do they trust each other (shared)? ";
        args.isolation = Some(asked(ask, question, named::<IsolationName>)?);
    }
    if args.workload.is_none() {
        let question = "What do the programs do (training, batch, inference, notebooks, kernels)? ";
        args.workload = Some(asked(ask, question, named::<WorkloadName>)?);
    }
    if args.demand.memory.is_none() {
        args.demand.memory = asked(ask, "Memory of one tenant, such as 6G (empty: not known)? ", optional)?;
    }
    if args.demand.compute.is_none() {
        let question = "Part of a GPU that one tenant needs, in percent (empty: not known)? ";
        args.demand.compute = asked(ask, question, optional)?;
    }
    if is_alone || args.isolation == Some(IsolationName::Hard) {
        return Ok(args);
    }
    let is_inference = args.workload == Some(WorkloadName::Inference);
    if is_inference && args.bounded_memory.is_none() {
        args.bounded_memory =
            Some(asked(ask, "Must the memory of each tenant be bounded (yes, no)? ", named::<YesNo>)?);
    }
    if is_inference && args.bounded_memory == Some(YesNo::Yes) {
        if args.soft_compute.is_none() {
            let question = "Is a limit of compute that is not exact enough (yes, no)? ";
            args.soft_compute = Some(asked(ask, question, named::<YesNo>)?);
        }
        return Ok(args);
    }
    if args.driver.is_none() {
        args.driver = Some(asked(ask, "Who installs the driver of the host (own, managed)? ", named::<DriverName>)?);
    }
    let is_small = is_inference || args.workload == Some(WorkloadName::Kernels);
    if args.driver == Some(DriverName::Own) && is_small && args.shared_faults.is_none() {
        let question = "May a fault of one tenant end the programs of others (yes, no)? ";
        args.shared_faults = Some(asked(ask, question, named::<YesNo>)?);
    }
    Ok(args)
}

/// Repeats a question until the answer is valid, and says each time that the last answer was not.
fn asked<T>(ask: &mut Ask<'_>, question: &str, parse: impl Fn(&str) -> Option<T>) -> Result<T, Failure> {
    let mut wrong = String::new();
    loop {
        let Some(line) = ask(&format!("{wrong}{question}"))? else {
            let error = ApiError::new(Code::BadRequest, "the input ended before all questions were answered");
            return Err(error.hint("answer with flags: `gpushctl advise --help`").into());
        };
        match parse(line.trim()) {
            Some(found) => return Ok(found),
            None => wrong = format!("{} is not an answer. ", Quoted(line.trim())),
        }
    }
}

/// Parses one of the words of a flag. The beginning of a word is enough if no other word begins with it.
fn named<T: ValueEnum>(text: &str) -> Option<T> {
    let text = text.to_ascii_lowercase();
    let begins = |value: &&T| value.to_possible_value().is_some_and(|name| name.get_name().starts_with(&text));
    let mut found = T::value_variants().iter().filter(begins);
    let first = found.next().filter(|_| !text.is_empty())?;
    found.next().is_none().then(|| first.clone())
}

/// Parses a value that may be missing.
fn optional<T: FromStr>(text: &str) -> Option<Option<T>> {
    if text.is_empty() { Some(None) } else { text.parse().ok().map(Some) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers the questions, and returns the flags with the number of questions.
    fn dialogue(args: AdviseMechanismArgs, answers: &[&str]) -> (Result<AdviseMechanismArgs, Failure>, usize) {
        let mut given = answers.iter();
        let mut asked = 0;
        let found = complete(args, &mut |_| {
            asked += 1;
            Ok(given.next().map(|&answer| answer.to_owned()))
        });
        (found, asked)
    }

    #[test]
    fn only_questions_on_the_path_are_asked() {
        let (found, asked) = dialogue(AdviseMechanismArgs::default(), &["1", "training", "", ""]);
        assert_eq!((found.unwrap().tenants, asked), (Some(1), 4));
        let (found, asked) = dialogue(AdviseMechanismArgs::default(), &["8", "hard", "inference", "6G", "12"]);
        let found = found.unwrap();
        assert_eq!(
            (found.isolation, found.demand.memory.map(gpush_api::MemoryLimit::mib)),
            (Some(IsolationName::Hard), Some(6144))
        );
        assert_eq!(asked, 5);
        let answers = ["8", "shared", "inference", "", "", "yes", "no"];
        let (found, asked) = dialogue(AdviseMechanismArgs::default(), &answers);
        assert_eq!((found.unwrap().soft_compute, asked), (Some(YesNo::No), 7));
        let answers = ["8", "shared", "kernels", "", "", "own", "yes"];
        let (found, asked) = dialogue(AdviseMechanismArgs::default(), &answers);
        assert_eq!((found.unwrap().shared_faults, asked), (Some(YesNo::Yes), 7));
        let (_, asked) = dialogue(AdviseMechanismArgs::default(), &["8", "shared", "notebooks", "", "", "managed"]);
        assert_eq!(asked, 6);
    }

    #[test]
    fn wrong_answer_is_asked_again_and_flags_are_not_asked() {
        let args = AdviseMechanismArgs { workload: Some(WorkloadName::Batch), ..AdviseMechanismArgs::default() };
        let (found, asked) = dialogue(args, &["zero", "0", "2", "h", "lots", "", ""]);
        let found = found.unwrap();
        assert_eq!((found.tenants, found.isolation, asked), (Some(2), Some(IsolationName::Hard), 7));
    }

    /// Fault: the same question appeared again, without a word about the answer.
    #[test]
    fn wrong_answer_is_named_in_the_next_question() {
        let mut questions = Vec::new();
        let mut answers = ["many", "2"].into_iter();
        let found = asked(
            &mut |question| {
                questions.push(question.to_owned());
                Ok(answers.next().map(str::to_owned))
            },
            "How many? ",
            |text| text.parse::<u32>().ok(),
        );
        assert_eq!(found.unwrap(), 2);
        assert_eq!(questions, ["How many? ", "`many` is not an answer. How many? "]);
    }

    #[test]
    fn end_of_input_is_an_error() {
        let (found, _) = dialogue(AdviseMechanismArgs::default(), &["8"]);
        assert!(found.is_err());
    }
}
