4.429145216635641e-05  1.1850601561698851e-05 : Mass of the planets (in mstar)
92.36189780805844  14.605503693002136 : Semi-major axes
0.19021915341140563  0.4884818625815111 : Eccentricities
66.95104055467594  86.74905386172752 : Inclinaison (deg)
1  1 : is Inclinaison damping?
1  1 : planets feel Disk ?
1  1 : planets feel others ?
0  0 : Accretion onto planets ?
1.66  1.66 : Accretion parameter
0.001  0.001 : Maximum mass of the planet
0.4  0.4 : Smoothing
1.0  1.0 : Region excluded from torque calculation
