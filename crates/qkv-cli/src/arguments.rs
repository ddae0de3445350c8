//! The arguments of a command, declared once in a table. The parser, `--help`, the man pages, shell completions and
//! `docs/run.md` all come from it. Each command declares its arguments, and implements them, in its own file.

use clap::builder::{PossibleValuesParser, ValueParser};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, value_parser};
use std::any::Any;
use std::path::PathBuf;

/// How the value of an argument is parsed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    /// No value: present or absent.
    Switch,
    /// The path of a file or folder.
    Path,
    /// Any text.
    Text,
    /// One of the words in `values`.
    Word,
    /// A finite number.
    Finite,
    /// A finite number above 0.
    Positive,
    /// At least 0 and less than 1.
    Probability,
    /// At least 0 and at most 1.
    Fraction,
    /// A whole number within these bounds, both included.
    Integer(u64, u64),
    /// A type with its own parser.
    Custom(fn() -> ValueParser),
}

impl Kind {
    /// A seed of any random generator.
    pub const SEED: Kind = Kind::Integer(0, u64::MAX);
    /// A number of tokens, at least 1.
    pub const TOKENS: Kind = Kind::Integer(1, 1 << 20);
    /// A number of tokens; 0 turns the feature off.
    pub const WHOLE: Kind = Kind::Integer(0, 1 << 30);

    fn parser(self, values: &'static [(&'static str, &'static str)]) -> ValueParser {
        let number = |expected: &'static str, fits: fn(f64) -> bool| {
            ValueParser::new(move |typed: &str| -> Result<f64, String> {
                typed.parse().ok().filter(|&x| fits(x)).ok_or_else(|| format!("expected {expected}"))
            })
        };
        match self {
            Kind::Switch | Kind::Path => value_parser!(PathBuf),
            Kind::Text => ValueParser::string(),
            Kind::Word => PossibleValuesParser::new(values.iter().map(|(word, _)| *word)).into(),
            Kind::Finite => number("a finite number", f64::is_finite),
            Kind::Positive => number("a finite number above 0", |x| x.is_finite() && x > 0.0),
            Kind::Probability => number("a probability, at least 0 and less than 1", |p| (0.0..1.0).contains(&p)),
            Kind::Fraction => number("a number between 0 and 1", |p| (0.0..=1.0).contains(&p)),
            Kind::Integer(least, most) => ValueParser::new(move |typed: &str| integer(typed, least, most)),
            Kind::Custom(parser) => parser(),
        }
    }
}

/// A whole number within bounds. A number too large for `u64` gets the same message, which names the bounds.
fn integer(typed: &str, least: u64, most: u64) -> Result<u64, String> {
    let number: Option<u64> = typed.parse().ok().filter(|n| (least..=most).contains(n));
    number.ok_or_else(|| format!("expected a whole number from {least} to {most}"))
}

/// One argument of a command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Argument {
    /// Its name, without the dashes.
    pub name: &'static str,
    /// Placeholder of its value in help, if `values` is empty.
    value: &'static str,
    kind: Kind,
    /// One line of help.
    help: &'static str,
    /// Shown in help only. Commands apply it themselves, so that they can still tell whether the argument was given.
    default: Option<&'static str>,
    /// What each value means.
    pub values: &'static [(&'static str, &'static str)],
    /// Other arguments, at least one of which must be given too.
    requires: &'static [Other],
    /// Other arguments that it cannot be used with.
    conflicts: &'static [Other],
    repeatable: bool,
    pub positional: bool,
    required: bool,
    /// The value if the name is typed without one; any other value follows a `=`.
    bare_value: Option<&'static str>,
}

/// Arguments, grouped under their headings in help.
pub(crate) type Arguments = &'static [(&'static str, &'static [Argument])];

/// Another argument as typed, without the dashes: `output`, or `select top-k:K` for one of its values.
type Other = &'static str;

/// `--threads`, which most commands share.
pub(crate) const THREADS: Argument =
    Argument::new("threads", Kind::Integer(1, 1024), "Number of threads; all cores by default").value("N");

/// `--adapter`, for commands whose model may have low-rank adapters.
pub(crate) const ADAPTER: Argument =
    Argument::new("adapter", Kind::Path, "Folder of low-rank adapters (LoRA) for the model, in PEFT's format")
        .value("DIR");

/// `--model`, for commands that fall back on the embedded model.
pub(crate) const MODEL_OR_EMBEDDED: Argument =
    Argument::new("model", Kind::Path, "Folder of the model; the embedded one by default").value("DIR");

impl Argument {
    pub const fn new(name: &'static str, kind: Kind, help: &'static str) -> Argument {
        Argument {
            name,
            value: "",
            kind,
            help,
            default: None,
            values: &[],
            requires: &[],
            conflicts: &[],
            repeatable: false,
            positional: false,
            required: false,
            bare_value: None,
        }
    }

    pub const fn value(self, value: &'static str) -> Argument {
        Argument { value, ..self }
    }

    pub const fn default(self, default: &'static str) -> Argument {
        Argument { default: Some(default), ..self }
    }

    pub const fn values(self, values: &'static [(&'static str, &'static str)]) -> Argument {
        Argument { values, ..self }
    }

    pub const fn requires(self, requires: &'static [Other]) -> Argument {
        Argument { requires, ..self }
    }

    pub const fn conflicts(self, conflicts: &'static [Other]) -> Argument {
        Argument { conflicts, ..self }
    }

    pub const fn repeatable(self) -> Argument {
        Argument { repeatable: true, ..self }
    }

    pub const fn positional(self) -> Argument {
        Argument { positional: true, ..self }
    }

    pub const fn required(self) -> Argument {
        Argument { required: true, ..self }
    }

    pub const fn bare_value(self, value: &'static str) -> Argument {
        Argument { bare_value: Some(value), ..self }
    }

    /// Its help with its default and its relations to other arguments.
    pub fn describe(&self) -> String {
        let mut help = self.help.to_string();
        if let Some(bare) = self.bare_value {
            help += &format!(" [without a value: {bare}]");
        }
        if let Some(default) = self.default {
            help += &format!(" [default: {default}]");
        }
        if self.repeatable {
            help += " [repeatable]";
        }
        if !self.requires.is_empty() {
            help += &format!(" [requires {}]", any_of(self.requires));
        }
        if !self.conflicts.is_empty() {
            help += &format!(" [not with {}]", any_of(self.conflicts));
        }
        help
    }

    /// Its name in errors: `--beam`, or `TEXT` if it is positional.
    fn shown(&self) -> String {
        if self.positional { self.value.into() } else { format!("--{}", self.name) }
    }

    /// Its value as help writes it; empty for a switch.
    pub fn placeholder(&self) -> String {
        let words: Vec<&str> = self.values.iter().map(|(value, _)| *value).collect();
        if words.is_empty() { self.value.into() } else { words.join("|") }
    }

    /// Converts it to an argument of `clap`.
    pub fn to_clap(self) -> Arg {
        let short = self.describe();
        let width = self.values.iter().map(|(value, _)| value.len()).max().unwrap_or(0);
        let long = self.values.iter().fold(short.clone(), |long, (value, meaning)| {
            format!("{long}\n  {value:width$}  {meaning}") // one line per value
        });
        let arg = Arg::new(self.name).help(short).long_help(long).required(self.required);
        let arg = if self.positional { arg } else { arg.long(self.name) };
        if let Kind::Switch = self.kind {
            return arg.action(ArgAction::SetTrue);
        }
        let parser = self.kind.parser(self.values);
        let arg = arg.value_name(self.placeholder()).value_parser(parser).hide_possible_values(true);
        let arg = if self.repeatable { arg.action(ArgAction::Append) } else { arg };
        let arg = match self.bare_value {
            Some(value) => arg.num_args(0..=1).require_equals(true).default_missing_value(value),
            None => arg,
        };
        // A leading minus starts a negative scale or offset, or a mistake that the value's own parser should report.
        arg.allow_negative_numbers(!matches!(self.kind, Kind::Path | Kind::Text))
    }
}

/// `--a`, `--b` or `--c`.
fn any_of(others: &[Other]) -> String {
    let typed: Vec<String> = others.iter().map(|other| format!("`--{other}`")).collect();
    match &typed[..] {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => typed.concat(),
    }
}

/// The parsed command line of one command, read by argument type.
pub(crate) struct Matches<'a>(pub &'a ArgMatches);

impl Matches<'_> {
    pub fn switch(&self, name: &str) -> bool {
        self.0.get_flag(name)
    }

    pub fn text(&self, name: &str) -> Option<String> {
        self.value(name)
    }

    pub fn texts(&self, name: &str) -> Vec<String> {
        self.all(name)
    }

    /// The word of an argument of kind [`Kind::Word`].
    pub fn word(&self, name: &str) -> Option<&str> {
        self.0.get_one::<String>(name).map(String::as_str)
    }

    pub fn path(&self, name: &str) -> Option<PathBuf> {
        self.value(name)
    }

    /// The path of an argument that the table requires.
    pub fn required_path(&self, name: &str) -> PathBuf {
        self.path(name).unwrap_or_default()
    }

    pub fn paths(&self, name: &str) -> Vec<PathBuf> {
        self.all(name)
    }

    pub fn number(&self, name: &str) -> Option<f64> {
        self.value(name)
    }

    pub fn seed(&self, name: &str) -> Option<u64> {
        self.value(name)
    }

    /// A whole number, saturated at `usize::MAX`.
    pub fn count(&self, name: &str) -> Option<usize> {
        self.value::<u64>(name).map(|n| usize::try_from(n).unwrap_or(usize::MAX))
    }

    /// The value of an argument, of whatever type its parser returns.
    pub fn value<T: Any + Clone + Send + Sync>(&self, name: &str) -> Option<T> {
        self.0.get_one::<T>(name).cloned()
    }

    /// All values of a repeatable argument.
    pub fn all<T: Any + Clone + Send + Sync>(&self, name: &str) -> Vec<T> {
        self.0.get_many::<T>(name).into_iter().flatten().cloned().collect()
    }

    /// Checks that each typed argument comes with what it requires, and with nothing that it conflicts with.
    pub fn check(&self, arguments: Arguments) -> Result<(), String> {
        let typed = |argument: &&Argument| self.0.value_source(argument.name) == Some(ValueSource::CommandLine);
        for argument in arguments.iter().flat_map(|(_, arguments)| *arguments).filter(typed) {
            if !argument.requires.is_empty() && !argument.requires.iter().any(|other| self.has(other)) {
                return Err(format!("`{}` requires {}", argument.shown(), any_of(argument.requires)));
            }
            if let Some(other) = argument.conflicts.iter().find(|other| self.has(other)) {
                return Err(format!("`{}` cannot be used with `--{other}`", argument.shown()));
            }
        }
        Ok(())
    }

    /// Whether another argument was typed, with its value if `other` names one.
    fn has(&self, other: Other) -> bool {
        let (name, value) = other.split_once(' ').map_or((other, None), |(name, value)| (name, Some(value)));
        let word = |form: &str| form.split(':').next().map(str::to_string);
        let typed = self.0.get_raw(name).and_then(|mut raw| raw.next()).and_then(|raw| raw.to_str());
        self.0.value_source(name) == Some(ValueSource::CommandLine)
            && value.is_none_or(|value| typed.and_then(word) == word(value))
    }
}

/// Asserts that relations name arguments and values that exist; for the tests of every command.
#[cfg(test)]
pub(crate) fn assert_relations_exist(arguments: Arguments) {
    let all = || arguments.iter().flat_map(|(_, arguments)| *arguments);
    for other in all().flat_map(|argument| argument.requires.iter().chain(argument.conflicts)) {
        let (name, value) = other.split_once(' ').map_or((*other, None), |(name, value)| (name, Some(value)));
        let found = all().find(|argument| argument.name == name).unwrap_or_else(|| panic!("no `--{name}`"));
        let known = |value: &str| found.values.iter().any(|(known, _)| *known == value);
        assert!(value.is_none_or(known), "`--{other}`");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_beyond_64_bits_is_answered_with_the_range() {
        let error = integer("340282366920938463463374607431768211456", 1, 1024).unwrap_err();
        assert_eq!(error, "expected a whole number from 1 to 1024");
        assert_eq!(integer("7", 0, u64::MAX), Ok(7));
        assert!(integer("-1", 0, 9).is_err() && integer("1.5", 0, 9).is_err() && integer("", 0, 9).is_err());
    }

    #[test]
    fn help_lists_the_default_and_the_relations() {
        let argument = Argument::new("top-k", Kind::WHOLE, "Sample from the K likeliest tokens")
            .value("K")
            .default("0")
            .requires(&["sample", "chat"])
            .conflicts(&["greedy"]);
        let expected = "Sample from the K likeliest tokens [default: 0] [requires `--sample` or `--chat`] \
                        [not with `--greedy`]";
        assert_eq!(argument.describe(), expected);
    }
}
