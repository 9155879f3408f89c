//! Who a caller over TLS is, by its certificate.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use hyper::http::Extensions;
use mainstay_model::operator::ORGANIZATION;
use mainstay_node::CalledBy;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

/// Maximum number of characters of a name that are kept.
const MAX_NAME: usize = 100;

/// What the certificate of a caller says. An authority of the site has signed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Certificate {
    /// The common name, or else the first SPIFFE id or host name.
    pub(super) name: String,
    /// Whether the caller may read the texts of all jobs.
    pub(super) is_operator: bool,
}

impl Certificate {
    /// Reads a certificate in DER. `None` if it has no name.
    pub(super) fn parse(der: &[u8]) -> Option<Certificate> {
        let (_, certificate) = X509Certificate::from_der(der).ok()?;
        let subject = certificate.subject();
        let common = subject.iter_common_name().find_map(|name| name.as_str().ok());
        let others = certificate.subject_alternative_name().ok().flatten();
        let mut others = others.iter().flat_map(|names| &names.value.general_names);
        let other = || {
            others.find_map(|name| match name {
                GeneralName::URI(name) | GeneralName::DNSName(name) => Some(*name),
                _ => None,
            })
        };
        let name = common.or_else(other)?.chars().take(MAX_NAME).collect();
        let is_operator = subject.iter_organization().any(|of| of.as_str() == Ok(ORGANIZATION));
        Some(Certificate { name, is_operator })
    }
}

/// What is known about a caller over TCP.
#[derive(Clone, Debug)]
pub(super) struct TcpCallerInfo {
    pub(super) address: Option<SocketAddr>,
    /// None without TLS.
    pub(super) certificate: Option<Arc<Certificate>>,
}

impl TcpCallerInfo {
    /// Whether a request came from a program of an operator.
    pub(super) fn is_operator(request: &Extensions) -> bool {
        let caller = request.get::<TcpCallerInfo>();
        caller.and_then(|caller| caller.certificate.as_ref()).is_some_and(|of| of.is_operator)
    }

    /// For the journal.
    pub(super) fn called_by(&self) -> CalledBy {
        let address = self.address.map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |address| address.ip());
        let certificate = self.certificate.as_ref().map(|certificate| certificate.name.clone());
        CalledBy::Remote { address, certificate }
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType};

    use super::*;

    fn parsed(common: Option<&str>, organization: Option<&str>, uri: Option<&str>) -> Option<Certificate> {
        let mut params = CertificateParams::default();
        params.distinguished_name = rcgen::DistinguishedName::new();
        common.into_iter().for_each(|name| params.distinguished_name.push(DnType::CommonName, name));
        let organization = organization.into_iter();
        organization.for_each(|name| params.distinguished_name.push(DnType::OrganizationName, name));
        params.subject_alt_names = uri.map(|uri| SanType::URI(uri.try_into().unwrap())).into_iter().collect();
        let key = KeyPair::generate().unwrap();
        Certificate::parse(params.self_signed(&key).unwrap().der())
    }

    #[test]
    fn the_name_and_the_role_of_a_caller_are_in_its_certificate() {
        let of = |name: &str, is_operator| Some(Certificate { name: name.to_owned(), is_operator });
        assert_eq!(parsed(Some("prometheus"), None, None), of("prometheus", false));
        assert_eq!(parsed(Some("admin"), Some(ORGANIZATION), None), of("admin", true));
        assert_eq!(parsed(Some("x"), Some("another mainstay-operator"), None), of("x", false));
        // Not by the name: whoever may name a host would be an operator.
        assert_eq!(parsed(Some(ORGANIZATION), None, None), of(ORGANIZATION, false));
        assert_eq!(parsed(None, None, Some("spiffe://site/scraper")), of("spiffe://site/scraper", false));
        assert_eq!(parsed(None, None, None), None);
        let long = "n".repeat(200);
        assert_eq!(parsed(Some(&long), None, None), of(&long[..MAX_NAME], false));
        assert_eq!(Certificate::parse(b"no certificate"), None);
    }
}
