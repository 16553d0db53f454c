//! Names of GPUs in an operation's error. The first mention of a GPU has its index and UUID, later mentions have only
//! its index.
//!
//! Several layers of gpushd add sentences to an error, each with the full names of GPUs. Without this module, the error
//! would repeat their UUIDs. Commands in the error keep the UUID.

use gpush_api::{ApiError, GpuIndex, GpuPlan, GpuUuid};

/// A GPU, and whether a sentence has already named it in full.
struct GpuMention {
    index: GpuIndex,
    uuid: GpuUuid,
    reported: bool,
}

/// Returns the error with each GPU of `plans` named in full only once.
pub(crate) fn once(mut error: ApiError, plans: &[GpuPlan]) -> ApiError {
    let name = |plan: &GpuPlan| GpuMention {
        index: plan.gpu,
        uuid: plan.gpu_uuid.clone(),
        reported: plan.gpu_uuid.is_empty(),
    };
    let mut names: Vec<GpuMention> = plans.iter().map(name).filter(|name| !name.reported).collect();
    shorten_error(&mut error, &mut names);
    error
}

fn shorten_error(error: &mut ApiError, names: &mut [GpuMention]) {
    let sentences = std::iter::once(&mut error.message).chain(&mut error.causes);
    sentences.for_each(|sentence| shorten_sentence(sentence, names));
    error.errors.iter_mut().for_each(|one| shorten_error(one, names));
    let sentences = error.outcome.iter_mut().chain(&mut error.hint);
    sentences.for_each(|sentence| shorten_sentence(sentence, names));
}

fn shorten_sentence(sentence: &mut String, names: &mut [GpuMention]) {
    for name in names {
        if sentence.contains(name.uuid.as_str()) {
            *sentence = shorten(sentence, name);
        }
    }
}

/// Shortens a GPU's name in a sentence, except at the first mention of the GPU in the error.
fn shorten(sentence: &str, name: &mut GpuMention) -> String {
    let GpuMention { index, uuid, reported } = name;
    let (index, full) = (format!("GPU {index}"), format!("GPU {index} ({uuid})"));
    // If an earlier sentence has named the GPU, remove the UUID at the start of a driver's message.
    let sentence = match sentence.strip_prefix(&format!("{uuid}: ")) {
        Some(rest) if *reported => rest,
        Some(_) | None => sentence,
    };
    let mut out = String::new();
    // Text between backquotes is a command, so leave every second part unchanged.
    for (at, part) in sentence.split('`').enumerate() {
        if at > 0 {
            out.push('`');
        }
        if at % 2 == 1 {
            out += part;
            continue;
        }
        let short = |text: &str| text.replace(&full, &index).replace(uuid.as_str(), &index);
        let first = [full.as_str(), uuid.as_str()].into_iter().filter_map(|name| Some((part.find(name)?, name.len())));
        match first.min().filter(|_| !*reported) {
            Some((at, length)) => {
                *reported = true;
                out += &format!("{}{full}{}", &part[..at], short(&part[at + length..]));
            }
            None => out += &short(part),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use gpush_api::Code;

    use super::*;

    #[test]
    fn gpu_is_named_in_full_once_and_commands_keep_uuid() {
        let plans = [(1, "GPU-aaaa"), (12, "GPU-bbbb")].map(|(gpu, uuid)| GpuPlan {
            gpu: GpuIndex(gpu),
            gpu_uuid: uuid.into(),
            ..GpuPlan::default()
        });
        let error = ApiError::new(Code::GpuLost, "GPU 1 (GPU-aaaa): creating GPU instance 3g.40gb@4 failed")
            .cause("GPU-aaaa: nvmlDeviceCreateGpuInstance: the GPU has fallen off the bus")
            .cause("GPU-bbbb: reading it back failed")
            .cause("GPU 1 (GPU-aaaa) is lost, and GPU 12 (GPU-bbbb) is not")
            .hint("`nvidia-smi -i GPU-aaaa`; GPU-aaaa is back only after a reset");
        let error = once(error, &plans);
        assert_eq!(error.message, "GPU 1 (GPU-aaaa): creating GPU instance 3g.40gb@4 failed");
        let causes = [
            "nvmlDeviceCreateGpuInstance: the GPU has fallen off the bus",
            "GPU 12 (GPU-bbbb): reading it back failed",
            "GPU 1 is lost, and GPU 12 is not",
        ];
        assert_eq!(error.causes, causes);
        assert_eq!(error.hint.as_deref(), Some("`nvidia-smi -i GPU-aaaa`; GPU 1 is back only after a reset"));
        assert_eq!(once(error.clone(), &plans), error, "twice is once");
        assert_eq!(once(error.clone(), &[GpuPlan::default()]), error);
    }
}
