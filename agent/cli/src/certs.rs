//! `mainstay certs`: an authority of a site, and certificates for agents and for who asks them over TCP.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use mainstay_model::operator::ORGANIZATION;
use mainstay_tier::peer::tls::TlsFiles;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, date_time_ymd,
};
use x509_parser::extensions::GeneralName;
use x509_parser::pem::parse_x509_pem;

use super::output;

const DAY: u64 = 86_400;

/// How long an authority is valid, in days.
const AUTHORITY_DAYS: u64 = 3650;

/// How far clocks of hosts may be behind.
const SKEW: Duration = Duration::from_secs(3600);

/// The authority's certificate and key, in its directory.
const AUTHORITY: &str = "ca.crt";
const AUTHORITY_KEY: &str = "ca.key";

const EXAMPLES: &str = "\
Examples:
  mainstay certs init /etc/mainstay/certs                          an authority: ca.crt and ca.key
  mainstay certs issue /etc/mainstay/certs node7 --host 10.0.0.7   the directory node7, for node7 and 10.0.0.7
  mainstay certs issue /etc/mainstay/certs prometheus              for a client
  mainstay certs issue /etc/mainstay/certs admin --role operator   for a client that reads messages of all jobs
  mainstay certs renew /etc/mainstay/certs                         all that end within 30 days

Exit status: 0 written, 64 the command line was not understood, 70 a file cannot be read or written.";

/// Make certificates for the agent's API over TCP and for checkpoints between agents
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Make an authority. Its key stays on the machine on which certificates are issued
    Init {
        /// The directory for ca.crt and ca.key; it is created
        dir: PathBuf,
    },
    /// Issue a certificate that is valid for a server and for a client: a directory with tls.crt, tls.key and ca.crt
    Issue {
        /// The directory of the authority
        dir: PathBuf,
        /// Who gets it: the name of a host or of a client
        name: String,
        /// A further host name or address of the server; may be given several times
        #[arg(long = "host", value_name = "HOST")]
        hosts: Vec<String>,
        /// How long it is valid
        #[arg(long, default_value_t = 90, value_parser = clap::value_parser!(u64).range(1..=AUTHORITY_DAYS))]
        days: u64,
        /// What a caller of the agent may read
        #[arg(long, value_enum, default_value_t)]
        role: Role,
    },
    /// Issue certificates again, with the same names and new keys
    Renew {
        /// The directory of the authority
        dir: PathBuf,
        /// Those that end within so many days
        #[arg(long, default_value_t = 30, value_name = "DAYS")]
        within: u64,
    },
}

/// What a caller of the agent over TCP may read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
enum Role {
    /// Health, events, metrics and numbers of jobs
    #[default]
    Reader,
    /// In addition the commands, paths and messages of all jobs, with secrets masked
    Operator,
}

pub(super) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    match &args.command {
        Command::Init { dir } => init(dir)?,
        Command::Issue { dir, name, hosts, days, role } => {
            let names = std::iter::once(name.as_str()).chain(hosts.iter().map(String::as_str));
            issue(dir, name, names, *days, *role)?;
        }
        Command::Renew { dir, within } => renew(dir, *within)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn init(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    let key = KeyPair::generate().context("making a key")?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "Mainstay authority");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    valid_for(&mut params, AUTHORITY_DAYS)?;
    let certificate = params.self_signed(&key).context("signing the authority's certificate")?;
    // Certificates of a replaced authority would be refused everywhere.
    let path = dir.join(AUTHORITY_KEY);
    let new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    new.and_then(|mut file| file.write_all(key.serialize_pem().as_bytes()))
        .with_context(|| format!("writing {}", path.display()))?;
    write(&dir.join(AUTHORITY), &certificate.pem(), 0o644)
}

fn issue<'n>(
    dir: &Path,
    name: &str,
    hosts: impl Iterator<Item = &'n str>,
    days: u64,
    role: Role,
) -> anyhow::Result<()> {
    let is_file_name = |letter: char| letter.is_ascii_alphanumeric() || "._-".contains(letter);
    let is_authority = [AUTHORITY, AUTHORITY_KEY].contains(&name);
    if is_authority || name.starts_with(['.', '-']) || !name.chars().all(is_file_name) || name.is_empty() {
        bail!(
            "{name:?}: a name has letters, digits, `.`, `_` and `-`, and is not {AUTHORITY} or {AUTHORITY_KEY}"
        );
    }
    let is_of_host = |letter: char| letter.is_ascii_alphanumeric() || "._-*".contains(letter);
    let read = |name| {
        let path = dir.join(name);
        std::fs::read_to_string(&path)
            .with_context(|| format!("reading {} (`mainstay certs init` makes it)", path.display()))
    };
    let (authority, key) = (read(AUTHORITY)?, read(AUTHORITY_KEY)?);
    let key = KeyPair::from_pem(&key).context("the authority's key")?;
    let issuer = Issuer::from_ca_cert_pem(&authority, key).context("the authority's certificate")?;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    if role == Role::Operator {
        params.distinguished_name.push(DnType::OrganizationName, ORGANIZATION);
    }
    for host in hosts {
        let san = match host.parse::<IpAddr>() {
            Ok(address) => SanType::IpAddress(address),
            Err(_) if host.is_empty() || !host.chars().all(is_of_host) => {
                bail!("--host {host:?}: write the name of a host or an address")
            }
            Err(_) => SanType::DnsName(host.try_into().with_context(|| format!("--host {host:?}"))?),
        };
        if !params.subject_alt_names.contains(&san) {
            params.subject_alt_names.push(san);
        }
    }
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    params.use_authority_key_identifier_extension = true;
    valid_for(&mut params, days)?;
    let own = KeyPair::generate().context("making a key")?;
    let certificate = params.signed_by(&own, &issuer).context("signing the certificate")?;
    let own_dir = dir.join(name);
    std::fs::create_dir_all(&own_dir).with_context(|| format!("making {}", own_dir.display()))?;
    let files = TlsFiles::of(&own_dir);
    // Who reads the files between the two keeps those that it has: they do not fit.
    write(&files.key, &own.serialize_pem(), 0o600)?;
    write(&files.certificate, &certificate.pem(), 0o644)?;
    write(&files.authorities, &authority, 0o644)
}

fn renew(dir: &Path, within: u64) -> anyhow::Result<()> {
    let read = std::fs::read_dir(dir).with_context(|| format!("reading {}", dir.display()))?;
    let mut names = Vec::new();
    for entry in read {
        let path = entry.with_context(|| format!("reading {}", dir.display()))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
        if TlsFiles::of(&path).certificate.exists() {
            names.push(name);
        }
    }
    names.sort();
    let until = now()? + within * DAY;
    for name in names {
        let old = Issued::read(&TlsFiles::of(&dir.join(&name)).certificate)?;
        if old.ends <= until {
            issue(dir, &name, old.hosts.iter().map(String::as_str), old.days, old.role)?;
        }
    }
    Ok(())
}

/// A certificate that is to be issued again.
#[derive(Debug)]
struct Issued {
    hosts: Vec<String>,
    days: u64,
    role: Role,
    /// In seconds since 1970.
    ends: u64,
}

impl Issued {
    fn read(path: &Path) -> anyhow::Result<Issued> {
        let text = std::fs::read(path).with_context(|| format!("reading {}", path.display()))?;
        Issued::parse(&text).with_context(|| format!("{}: it must hold a certificate in PEM", path.display()))
    }

    fn parse(text: &[u8]) -> anyhow::Result<Issued> {
        let (_, pem) = parse_x509_pem(text)?;
        let certificate = pem.parse_x509()?;
        let names = certificate.subject_alternative_name()?.map(|names| names.value.general_names.as_slice());
        let hosts = names.unwrap_or_default().iter().filter_map(|name| match name {
            GeneralName::DNSName(host) => Some((*host).to_owned()),
            GeneralName::IPAddress(bytes) => match bytes.len() {
                4 => <[u8; 4]>::try_from(*bytes).ok().map(|bytes| IpAddr::from(bytes).to_string()),
                _ => <[u8; 16]>::try_from(*bytes).ok().map(|bytes| IpAddr::from(bytes).to_string()),
            },
            _ => None,
        });
        let validity = certificate.validity();
        let (from, until) = (validity.not_before.timestamp(), validity.not_after.timestamp());
        let days = u64::try_from(until - from)?.div_euclid(DAY).max(1);
        let is_operator = certificate.subject().iter_organization().any(|of| of.as_str() == Ok(ORGANIZATION));
        let role = if is_operator { Role::Operator } else { Role::Reader };
        Ok(Issued { hosts: hosts.collect(), days, role, ends: u64::try_from(until)? })
    }
}

fn now() -> anyhow::Result<u64> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH).context("the clock of this host")?.as_secs())
}

fn valid_for(params: &mut CertificateParams, days: u64) -> anyhow::Result<()> {
    let now = date_time_ymd(1970, 1, 1) + Duration::from_secs(now()?);
    params.not_before = now - SKEW;
    params.not_after = now + Duration::from_secs(days * DAY);
    Ok(())
}

/// Replaces a file at once, so that a reader sees the old or the new one.
fn write(path: &Path, text: &str, mode: u32) -> anyhow::Result<()> {
    let new = path.with_extension("new");
    let written = || {
        let _ = std::fs::remove_file(&new);
        let mut file: File = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        std::fs::rename(&new, path)
    };
    written().with_context(|| format!("writing {}", path.display()))?;
    output::print(&format!("{}\n", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_certificate_is_renewed_with_its_names_before_it_ends() {
        let dir = testing::tempdir().unwrap();
        let dir = dir.path();
        init(dir).unwrap();
        issue(dir, "node7", ["node7", "10.0.0.7", "fd00::7"].into_iter(), 90, Role::Reader).unwrap();
        issue(dir, "long", ["long"].into_iter(), 400, Role::Reader).unwrap();
        issue(dir, "admin", ["admin"].into_iter(), 90, Role::Operator).unwrap();
        let files = |name: &str| TlsFiles::of(&dir.join(name));
        let read = |name: &str| std::fs::read_to_string(files(name).certificate).unwrap();
        let (short, long) = (read("node7"), read("long"));
        renew(dir, 30).unwrap();
        assert_eq!([&read("node7"), &read("long")], [&short, &long]);
        renew(dir, 100).unwrap();
        assert_ne!(read("node7"), short);
        assert_eq!(read("long"), long);
        let renewed = Issued::read(&files("node7").certificate).unwrap();
        assert_eq!(
            (renewed.hosts, renewed.days),
            (["node7", "10.0.0.7", "fd00::7"].map(str::to_owned).into(), 90)
        );
        assert_eq!(renewed.role, Role::Reader);
        assert_eq!(Issued::read(&files("admin").certificate).unwrap().role, Role::Operator);
        for key in [dir.join(AUTHORITY_KEY), files("node7").key] {
            let mode = std::fs::metadata(&key).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", key.display());
        }
        let authority = std::fs::read(dir.join(AUTHORITY)).unwrap();
        assert_eq!(std::fs::read(files("node7").authorities).unwrap(), authority);
    }

    #[test]
    fn an_authority_is_not_replaced_and_names_stay_in_the_directory() {
        let dir = testing::tempdir().unwrap();
        let dir = dir.path();
        let issue = |name: &str, host: &str| issue(dir, name, [host].into_iter(), 90, Role::Reader);
        assert!(issue("node7", "node7").is_err());
        init(dir).unwrap();
        let key = std::fs::read(dir.join(AUTHORITY_KEY)).unwrap();
        assert!(init(dir).is_err());
        assert_eq!(std::fs::read(dir.join(AUTHORITY_KEY)).unwrap(), key);
        for name in ["", "../x", "a/b", ".x", "-x", AUTHORITY, AUTHORITY_KEY] {
            assert!(issue(name, "host").is_err(), "{name:?}");
        }
        assert!(issue("node7", "not a host").is_err());
        assert!(Issued::parse(b"no certificate").is_err());
    }
}
