//! The addresses that one machine can choose from. Limits by address count these networks.

use std::net::{IpAddr, Ipv6Addr};

/// The network of an address: for IPv4 the address itself, even if written as IPv6; for IPv6 the
/// first 64 bits, because a machine there can use any number of addresses.
#[must_use]
pub fn network_prefix(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv6_network_is_64_bits_and_an_ipv4_one_an_address() {
        let of = |address: &str| network_prefix(address.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:ffff:ffff:ffff"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }
}
