//! Finds options at a wrong place of a command line of `run`: options of gpushctl after `--`, and options of docker that
//! gpushctl reads as something else.

use gpush_api::{ApiError, Code};

use super::{request_line, typed};

/// Returns the error for a command line with such an option. The words contain no options before the command.
pub(super) fn error(words: &[&str]) -> Option<ApiError> {
    if words.first() != Some(&"run") {
        return None;
    }
    let end = words.iter().position(|word| *word == "--").unwrap_or(words.len());
    let after = words.get(end + 1).filter(|word| word.starts_with('-'));
    let of_docker = words[..end].iter().find(|word| matches!(**word, "-it" | "-ti"));
    let (message, meant) = match (after, of_docker) {
        (Some(option), _) => {
            let without: Vec<&str> = [&words[..end], &words[end + 1..]].concat();
            (format!("`{option}` is not a command: the options of gpushctl stand before `--`"), without)
        }
        // gpushctl would read `t` as the name of a GPU.
        (None, Some(option)) => (format!("`{option}` is not an option: the command has your terminal"), words.to_vec()),
        (None, None) => return None,
    };
    let meant = request_line::rewritten(&meant)?;
    let line = typed::command_line(["gpushctl"].into_iter().chain(meant.iter().map(String::as_str)))?;
    Some(ApiError::new(Code::BadRequest, message).hint(format!("did you mean `{line}`?")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misplaced_option_of_run_leads_to_the_right_command() {
        for (typed, meant) in [
            ("run -- --mig 1g.10gb python x", Some("run --mig 1g.10gb -- python x")),
            ("run --for 2h -- --mps 25 ./x --mps 3", Some("run --for 2h --mps 25 -- ./x --mps 3")),
            ("run -it --mig 1g.10gb -- bash", Some("run --mig 1g.10gb -- bash")),
            ("run --mig 1g.10gb -- bash -it", None),
            ("run -i 0 --whole -- bash", None),
            ("status -it", None),
        ] {
            let words: Vec<&str> = typed.split(' ').collect();
            let hint = error(&words).map(|error| error.hint.unwrap_or_default());
            assert_eq!(hint, meant.map(|meant| format!("did you mean `gpushctl {meant}`?")), "{typed}");
        }
    }
}
