//! `cargo xtask release VERSION`: from a checked commit to a tagged one. Nothing is pushed or published.

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, ensure};
use fs_err as fs;
use jiff::civil::Date;
use semver::Version;

use crate::{command, paths};

/// The maximum length of a release's section in the changelog, in lines.
const MOST_LINES: usize = 60;

/// The chart has the version of the program, whose image it names.
const CHART: &str = "deploy/helm/mainstay/Chart.yaml";

/// What can be chosen.
#[derive(clap::Args)]
pub struct Args {
    /// The version, such as 0.1.0
    version: Version,
    /// Run the lints only, where `cargo xtask test` has just passed for this commit
    #[arg(long)]
    tested: bool,
    /// Show what would be done: no file is changed and no tag is made
    #[arg(long)]
    dry_run: bool,
}

/// Checks, sets the version, closes the changelog's section, commits and tags.
pub fn run(args: &Args) -> Result<ExitCode> {
    let version = &args.version;
    let tag = format!("v{version}");
    let changed = git(&["status", "--porcelain"])?;
    ensure!(changed.is_empty(), "the working tree has changes: commit them first\n{changed}");
    ensure!(git(&["tag", "--list", &tag])?.is_empty(), "the tag {tag} exists already");
    let [changelog, manifest, chart] =
        ["CHANGELOG.md", "Cargo.toml", CHART].map(|name| paths::root().join(name));
    let text = fs::read_to_string(&changelog)?;
    is_short(&text)?;
    let today = jiff::Timestamp::now().to_zoned(jiff::tz::TimeZone::UTC).date();
    let closed = close(&text, version, today)?;
    let set = set_version(&fs::read_to_string(&manifest)?, version)?;
    let of_chart = set_chart_version(&fs::read_to_string(&chart)?, version);

    // The whole suite, or the lints where the suite has run.
    let me = std::env::current_exe().context("finding this program's own file")?;
    command::run(Command::new(me).arg(if args.tested { "lint" } else { "test" }))
        .context("no release: a check failed")?;
    if args.dry_run {
        println!("would set the version to {version}, close the changelog's section and tag {tag}");
        return Ok(ExitCode::SUCCESS);
    }
    fs::write(&changelog, closed)?;
    fs::write(&manifest, set)?;
    fs::write(&chart, of_chart)?;
    // The lock file has the version of each member.
    command::run(&mut command::cargo("update --workspace --quiet"))?;
    git(&["add", "CHANGELOG.md", "Cargo.toml", "Cargo.lock", CHART])?;
    git(&["commit", "--quiet", "--message", &format!("Release {version}")])?;
    git(&["tag", "--annotate", &tag, "--message", &format!("Mainstay {version}")])?;
    println!("{tag} is tagged. Next: git push --follow-tags. There are no packages yet.");
    Ok(ExitCode::SUCCESS)
}

/// The changelog with the section `Unreleased` under the version's name, and an empty one above it.
fn close(changelog: &str, version: &Version, date: Date) -> Result<String> {
    const OPEN: &str = "## [Unreleased]";
    let (before, after) = changelog.split_once(OPEN).context("CHANGELOG.md has no section [Unreleased]")?;
    let name = format!("## [{version}]");
    ensure!(!after.contains(&name), "CHANGELOG.md has a section {name} already");
    let section = after.split("\n## [").next().unwrap_or_default();
    let has_entry = section.lines().any(|line| line.starts_with("- "));
    ensure!(has_entry, "CHANGELOG.md: the section [Unreleased] has no entry");
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
    let set = package.replacen(line, &format!("version = \"{version}\""), 1);
    Ok(format!("{before}[workspace.package]{set}"))
}

/// The chart's file with another version of the chart and of the program.
fn set_chart_version(chart: &str, version: &Version) -> String {
    let line = |line: &str| match line.split_once(": ") {
        Some((key @ ("version" | "appVersion"), _)) => format!("{key}: {version}\n"),
        _ => format!("{line}\n"),
    };
    chart.lines().map(line).collect()
}

/// What git prints in this repository.
pub fn git(arguments: &[&str]) -> Result<String> {
    let printed = command::output(Command::new("git").args(arguments).current_dir(paths::root()))?;
    Ok(printed.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const DATE: Date = jiff::civil::date(2026, 2, 3);

    fn version(text: &str) -> Version {
        Version::parse(text).expect("a version")
    }

    #[test]
    fn the_open_section_gets_the_versions_name_and_a_new_one_is_open() {
        let changelog =
            "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- a thing\n\n## [0.1.0] - 2026-01-01\n";
        let closed = close(changelog, &version("0.2.0"), DATE).expect("closed");
        assert_eq!(
            closed,
            "# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-02-03\n\n### Added\n\n- a thing\n\n\
             ## [0.1.0] - 2026-01-01\n"
        );
        let reported =
            |text: &str, number: &str| close(text, &version(number), DATE).expect_err("refused").to_string();
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
        let changelog = fs::read_to_string(paths::root().join("CHANGELOG.md")).expect("it is there");
        let changelog = changelog.replacen("## [Unreleased]", "## [Unreleased]\n\n- a thing", 1);
        close(&changelog, &version("99.0.0"), DATE).expect("closed");
        let manifest = fs::read_to_string(paths::root().join("Cargo.toml")).expect("it is there");
        let set = set_version(&manifest, &version("99.0.0-rc.1")).expect("set");
        let before: Vec<&str> = manifest.lines().collect();
        let changed: Vec<&str> = set.lines().filter(|line| !before.contains(line)).collect();
        assert_eq!(changed, ["version = \"99.0.0-rc.1\""]);
        let chart = fs::read_to_string(paths::root().join(CHART)).expect("it is there");
        let own = version(env!("CARGO_PKG_VERSION"));
        assert_eq!(set_chart_version(&chart, &own), chart, "the chart has this version");
        let set = set_chart_version(&chart, &version("99.0.0-rc.1"));
        let changed: Vec<&str> = set.lines().filter(|line| !chart.contains(line)).collect();
        assert_eq!(changed, ["version: 99.0.0-rc.1", "appVersion: 99.0.0-rc.1"]);
    }
}
