//! The format and the colors of the output, and the shells with completions.

use clap::ValueEnum;

/// `--output`. The values have no doc comments, because clap would then print each on a separate line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    Table,
    Wide,
    Json,
    Name,
    Uuid,
    Csv,
    // Only for `lease env`.
    #[value(hide = true, alias = "bash", alias = "zsh", alias = "dash", alias = "ksh")]
    Sh,
    // Only for `lease env`.
    #[value(hide = true)]
    Fish,
    // Only for `lease env`.
    #[value(hide = true, alias = "tcsh")]
    Csh,
    // Only for `lease env`.
    #[value(hide = true)]
    Docker,
}

impl Format {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Table => "table",
            Self::Wide => "wide",
            Self::Json => "json",
            Self::Name => "name",
            Self::Uuid => "uuid",
            Self::Csv => "csv",
            Self::Sh => "sh",
            Self::Fish => "fish",
            Self::Csh => "csh",
            Self::Docker => "docker",
        }
    }
}

/// The value of `--color`. `auto` colors output on a terminal, unless `NO_COLOR` is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    Auto,
    Always,
    Never,
}

/// A shell with completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    Bash,
    Elvish,
    Fish,
    Powershell,
    Zsh,
}

impl Shell {
    /// Returns the name on the command line.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bash => "bash",
            Self::Elvish => "elvish",
            Self::Fish => "fish",
            Self::Powershell => "powershell",
            Self::Zsh => "zsh",
        }
    }
}
