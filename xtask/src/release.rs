//! `cargo xtask release VERSION`: from a checked commit to a tagged one. Nothing is pushed or published.

use std::fs;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};

use crate::command;
use crate::paths;

/// The maximum length of a release's section in the changelog, in lines.
const MOST_LINES: usize = 60;

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// The version, such as 0.1.0
    version: String,
    /// Run the lints only, where `cargo xtask test` has just passed for this commit
    #[arg(long)]
    tested: bool,
    /// Show what would be done: no file is changed and no tag is made
    #[arg(long)]
    dry_run: bool,
}

/// Checks, sets the version, closes the changelog's section, commits and tags.
///
/// # Errors
/// The working tree is not clean, the tag exists, the changelog has no entries or too many, or a check failed.
pub fn run(args: &Args) -> Result<ExitCode> {
    let version = Version::parse(&args.version)?;
    let tag = format!("v{}", version.0);
    let changed = git(&["status", "--porcelain"])?;
    ensure!(changed.is_empty(), "the working tree has changes: commit them first\n{changed}");
    let known = git(&["tag", "--list", &tag])?;
    ensure!(known.is_empty(), "the tag {tag} exists already");
    let changelog = read("CHANGELOG.md")?;
    let manifest = read("Cargo.toml")?;
    let today = command::output(Command::new("date").args(["-u", "+%F"]))?;
    is_short(&changelog)?;
    let closed = close(&changelog, &version, today.trim())?;
    let set = set_version(&manifest, &version)?;

    check(args.tested)?;
    if args.dry_run {
        println!("would set the version to {}, close the changelog's section and tag {tag}", version.0);
        return Ok(ExitCode::SUCCESS);
    }
    write("CHANGELOG.md", &closed)?;
    write("Cargo.toml", &set)?;
    // The lock file has the version of each member.
    command::run(command::cargo().args(["update", "--workspace", "--quiet"]).current_dir(paths::root()))?;
    git(&["add", "CHANGELOG.md", "Cargo.toml", "Cargo.lock"])?;
    git(&["commit", "--quiet", "--message", &format!("Release {}", version.0)])?;
    git(&["tag", "--annotate", &tag, "--message", &format!("Mainstay {}", version.0)])?;
    println!("{tag} is tagged. Next: git push --follow-tags. There are no packages yet.");
    Ok(ExitCode::SUCCESS)
}

/// The whole suite, or the lints where the suite has run.
fn check(tested: bool) -> Result<()> {
    let me = std::env::current_exe().context("finding this program's own file")?;
    let what = if tested { "lint" } else { "test" };
    command::run(Command::new(me).arg(what)).context("no release: a check failed")
}

/// Three numbers, and what may follow a hyphen.
struct Version(String);

impl Version {
    fn parse(text: &str) -> Result<Version> {
        let numbers = text.split_once('-').map_or(text, |(numbers, _)| numbers);
        let parts: Vec<&str> = numbers.split('.').collect();
        let good = parts.len() == 3 && parts.iter().all(|part| part.parse::<u32>().is_ok());
        ensure!(good, "{text} is no version: MAJOR.MINOR.PATCH is, such as 0.1.0");
        Ok(Version(text.to_owned()))
    }
}

/// The changelog with the section `Unreleased` under the version's name, and an empty one above it.
fn close(changelog: &str, version: &Version, date: &str) -> Result<String> {
    const OPEN: &str = "## [Unreleased]";
    let (before, after) = changelog.split_once(OPEN).context("CHANGELOG.md has no section [Unreleased]")?;
    let name = format!("## [{}]", version.0);
    ensure!(!after.contains(&name), "CHANGELOG.md has a section {name} already");
    let section = after.split("\n## [").next().unwrap_or_default();
    ensure!(
        section.lines().any(|line| line.starts_with("- ")),
        "CHANGELOG.md: the section [Unreleased] has no entry"
    );
    Ok(format!("{before}{OPEN}\n\n{name} - {date}{after}"))
}

/// Whether it is short enough to be read to its end.
fn is_short(changelog: &str) -> Result<()> {
    let section = changelog.split("## [").nth(1).unwrap_or_default();
    let lines = section.trim().lines().count();
    ensure!(
        lines <= MOST_LINES,
        "CHANGELOG.md: the section [Unreleased] has {lines} lines; at most {MOST_LINES} are read"
    );
    Ok(())
}

/// The workspace's manifest with another version.
fn set_version(manifest: &str, version: &Version) -> Result<String> {
    let (before, package) =
        manifest.split_once("[workspace.package]").context("Cargo.toml has no [workspace.package]")?;
    let line = package.lines().find(|line| line.starts_with("version = ")).context("it has no version")?;
    let set = package.replacen(line, &format!("version = \"{}\"", version.0), 1);
    Ok(format!("{before}[workspace.package]{set}"))
}

fn git(arguments: &[&str]) -> Result<String> {
    command::output(Command::new("git").args(arguments).current_dir(paths::root()))
}

fn read(name: &str) -> Result<String> {
    let path = paths::root().join(name);
    fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))
}

fn write(name: &str, text: &str) -> Result<()> {
    let path = paths::root().join(name);
    fs::write(&path, text).with_context(|| format!("writing {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> Version {
        Version::parse(text).expect("a version")
    }

    #[test]
    fn the_open_section_gets_the_versions_name_and_a_new_one_is_open() {
        let changelog =
            "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- a thing\n\n## [0.1.0] - 2026-01-01\n";
        let closed = close(changelog, &version("0.2.0"), "2026-02-03").expect("closed");
        assert_eq!(
            closed,
            "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-02-03\n\n### Added\n\n- a thing\n\n\
             ## [0.1.0] - 2026-01-01\n"
        );
        let reported = |text: &str, number: &str| {
            close(text, &version(number), "2026-02-03").expect_err("refused").to_string()
        };
        assert!(reported(&closed, "0.3.0").contains("no entry"));
        assert!(reported(changelog, "0.1.0").contains("already"));
        is_short(changelog).expect("short");
        let long = format!("## [Unreleased]\n{}\n## [0.1.0]\n", "- a thing\n".repeat(60));
        assert!(is_short(&long).expect_err("refused").to_string().contains("61 lines"));
        assert!(reported("# Changelog\n", "0.3.0").contains("[Unreleased]"));
    }

    #[test]
    fn this_repositorys_changelog_can_be_released() {
        // Just after a release the open section is empty, which is refused; its first entry makes the next one
        // possible.
        let changelog = read("CHANGELOG.md").expect("it is there");
        let changelog = changelog.replacen("## [Unreleased]", "## [Unreleased]\n\n- a thing", 1);
        close(&changelog, &version("99.0.0"), "2026-02-03").expect("closed");
        let manifest = read("Cargo.toml").expect("it is there");
        let set = set_version(&manifest, &version("99.0.0-rc.1")).expect("set");
        let before: Vec<&str> = manifest.lines().collect();
        let changed: Vec<&str> = set.lines().filter(|line| !before.contains(line)).collect();
        assert_eq!(changed, ["version = \"99.0.0-rc.1\""]);
    }

    #[test]
    fn a_version_has_three_numbers() {
        for text in ["0.1", "v0.1.0", "0.1.x", "1.2.3.4", ""] {
            assert!(Version::parse(text).is_err(), "{text}");
        }
    }
}
