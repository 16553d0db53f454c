//! Errors of several GPUs that differ only in their GPU. Eight equal blocks hide the one that is different, so each is
//! shown once, with the numbers of the other GPUs.

use gpush_api::{ApiError, GpuIndex};

/// Errors that differ only in their GPU.
#[derive(Debug, PartialEq)]
pub(super) struct EqualErrors<'a> {
    /// The error of the first GPU.
    pub(super) first: &'a ApiError,
    /// The other GPUs with this error.
    pub(super) others: Vec<GpuIndex>,
}

/// Joins equal errors, in the order of the first of each.
pub(super) fn join<'a>(errors: impl IntoIterator<Item = &'a ApiError>) -> Vec<EqualErrors<'a>> {
    let mut all: Vec<(Option<ApiError>, EqualErrors<'a>)> = Vec::new();
    for error in errors {
        let without = gpu_of(&error.message).map(|gpu| (gpu, without_gpu(error, gpu)));
        let same = |known: &&mut (Option<ApiError>, EqualErrors<'a>)| {
            without.as_ref().is_some_and(|(_, own)| known.0.as_ref() == Some(own))
        };
        match (all.iter_mut().find(same), &without) {
            (Some((_, known)), Some((gpu, _))) => known.others.push(*gpu),
            (Some(_) | None, _) => {
                all.push((without.map(|(_, own)| own), EqualErrors { first: error, others: Vec::new() }));
            }
        }
    }
    all.into_iter().map(|(_, joined)| joined).collect()
}

/// Returns the GPU that a message names first.
fn gpu_of(message: &str) -> Option<GpuIndex> {
    let (_, after) = message.split_once("GPU ")?;
    let digits = after.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok().map(GpuIndex)
}

/// Returns an error without the number of its GPU.
fn without_gpu(error: &ApiError, gpu: GpuIndex) -> ApiError {
    let general = |text: &String| {
        let mut text = text.clone();
        for before in ["GPU ", "--gpu ", "-g ", "apply ", "profiles ", "show ", "list "] {
            text = replace_number(&text, before, gpu);
        }
        text
    };
    ApiError {
        message: general(&error.message),
        causes: error.causes.iter().map(general).collect(),
        hint: error.hint.as_ref().map(general),
        ..error.clone()
    }
}

/// Replaces the number of a GPU after the word `before`.
fn replace_number(text: &str, before: &str, gpu: GpuIndex) -> String {
    let with_number = format!("{before}{gpu}");
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(&with_number) {
        let end = at + with_number.len();
        let is_whole = !rest[end..].starts_with(|c: char| c.is_ascii_digit());
        out += &rest[..at];
        out += if is_whole { before } else { &with_number };
        rest = &rest[end..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use gpush_api::Code;

    use super::*;

    fn error(message: &str, hint: &str) -> ApiError {
        ApiError::new(Code::LayoutImpossible, message).hint(hint)
    }

    #[test]
    fn errors_that_differ_in_more_than_their_gpu_are_shown_separately() {
        let errors = [
            error("GPU 0 has room for 1 of 4g.40gb", "`gpushctl mig profiles --gpu 0` lists the profiles"),
            error("GPU 1 has room for 1 of 4g.40gb", "`gpushctl mig profiles --gpu 1` lists the profiles"),
            error("GPU 2 has room for 2 of 4g.40gb", "`gpushctl mig profiles --gpu 2` lists the profiles"),
            error("GPU 11 has room for 1 of 4g.40gb", "`gpushctl mig profiles --gpu 11` lists the profiles"),
            error("the host is in maintenance", "wait"),
            error("the host is in maintenance", "wait"),
        ];
        let joined: Vec<(&str, Vec<u32>)> = join(&errors)
            .into_iter()
            .map(|one| (one.first.message.as_str(), one.others.iter().map(|gpu| gpu.0).collect()))
            .collect();
        let maintenance = ("the host is in maintenance", vec![]);
        assert_eq!(
            joined,
            [
                ("GPU 0 has room for 1 of 4g.40gb", vec![1, 11]),
                ("GPU 2 has room for 2 of 4g.40gb", vec![]),
                maintenance.clone(),
                maintenance,
            ]
        );
    }

    /// `GPU 1` is also the beginning of `GPU 12`.
    #[test]
    fn number_of_another_gpu_stays() {
        assert_eq!(replace_number("GPU 1 and GPU 12", "GPU ", GpuIndex(1)), "GPU  and GPU 12");
    }
}
