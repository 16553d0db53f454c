//! Completion in bash.
//!
//! bash splits words at `:`, `=` and `@`. So it treats `1:2g.20gb@2` or `--gpu=0` as several words.
//! The script joins these words before it calls gpushctl. bash replaces only its last word, so the
//! script then removes the earlier words from each candidate.

use std::{ffi::OsString, io, path::Path};

use clap::Command;
use clap_complete::env::{Bash as ClapBash, EnvCompleter};

/// bash, with a script that joins words which bash splits.
#[derive(Debug)]
pub(super) struct Bash;

const SCRIPT: &str = r#"_gpushctl() {
    local rest=${COMP_LINE:0:COMP_POINT} words=() i trimmed prefix
    for ((i = 0; i <= COMP_CWORD; i++)); do
        trimmed=${rest#"${rest%%[![:space:]]*}"}
        local word=${COMP_WORDS[i]}
        ((i == COMP_CWORD)) && word=$trimmed
        if ((i > 0)) && [[ $trimmed == "$rest" && -n $rest ]]; then
            words[${#words[@]} - 1]+=$word
        else
            words+=("$word")
        fi
        rest=${trimmed#"$word"}
    done
    local current=${words[${#words[@]} - 1]}
    prefix=${current%"$2"}
    local IFS=$'\013'
    COMPREPLY=($(_CLAP_IFS="$IFS" _CLAP_COMPLETE_INDEX=$((${#words[@]} - 1)) VARIABLE=bash "COMPLETER" -- "${words[@]}" 2> /dev/null))
    (($? == 0)) || COMPREPLY=()
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=/:] ]] && compopt -o nospace
    return 0
}
complete -o bashdefault -o nosort -F _gpushctl BIN 2> /dev/null || complete -o bashdefault -F _gpushctl BIN
"#;

impl EnvCompleter for Bash {
    fn name(&self) -> &'static str {
        "bash"
    }

    fn is(&self, name: &str) -> bool {
        name == "bash"
    }

    fn write_registration(
        &self,
        var: &str,
        _name: &str,
        bin: &str,
        completer: &str,
        buf: &mut dyn io::Write,
    ) -> io::Result<()> {
        let script = SCRIPT.replace("VARIABLE", var).replace("COMPLETER", completer).replace("BIN", bin);
        buf.write_all(script.as_bytes())
    }

    fn write_complete(
        &self,
        cmd: &mut Command,
        args: Vec<OsString>,
        current_dir: Option<&Path>,
        buf: &mut dyn io::Write,
    ) -> io::Result<()> {
        ClapBash.write_complete(cmd, args, current_dir, buf)
    }
}
