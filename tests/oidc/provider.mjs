// A real OpenID provider for tests. Whoever types a name is that person; /test/* changes what it knows.
import { createServer } from 'node:http';
import { generateKeyPairSync } from 'node:crypto';
import { Provider } from 'oidc-provider';

const groups = new Map();
let instance;
let handle;

const newKey = () => ({
  ...generateKeyPairSync('rsa', { modulusLength: 2048 }).privateKey.export({ format: 'jwk' }),
  kid: `key-${Math.random().toString(36).slice(2)}`,
  use: 'sig',
  alg: 'RS256',
});

const account = async (_, sub) => ({
  accountId: sub,
  claims: async () => ({ sub, name: `Person ${sub}`, groups: groups.get(sub) ?? [] }),
});

const page = (ctx, text) => { ctx.body = `<!doctype html><title>test</title>${text}`; };

const configuration = (jwks) => ({
  jwks,
  clients: ['penstock', 'other'].map((client_id) => ({
    client_id,
    token_endpoint_auth_method: 'none',
    application_type: 'native',
    grant_types: ['authorization_code', 'urn:ietf:params:oauth:grant-type:device_code'],
    redirect_uris: ['http://127.0.0.1/callback'],
    response_types: ['code'],
  })),
  claims: { openid: ['sub'], profile: ['name'], groups: ['groups'] },
  scopes: ['openid', 'profile', 'groups'],
  conformIdTokenClaims: false,
  cookies: { keys: ['test'] },
  findAccount: account,
  extraTokenClaims: async (_, token) => ({ groups: groups.get(token.accountId) ?? [] }),
  interactions: { url: (_, interaction) => `/interaction/${interaction.uid}` },
  pkce: { required: () => true },
  renderError: (ctx, out) => page(ctx, `<pre>${out.error}: ${out.error_description}</pre>`),
  ttl: { AccessToken: 600, AuthorizationCode: 60, DeviceCode: 600, Grant: 600, IdToken: 600, Interaction: 600, Session: 600 },
  features: {
    devInteractions: { enabled: false },
    deviceFlow: {
      enabled: true,
      userCodeInputSource: (ctx, form) => page(ctx, form),
      userCodeConfirmSource: (ctx, form) => page(ctx, form),
      successSource: (ctx) => page(ctx, '<p>confirmed</p>'),
    },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => 'https://penstock.test',
      useGrantedResource: () => true,
      getResourceServerInfo: () => ({ scope: 'openid profile groups', audience: 'penstock-api', accessTokenFormat: 'jwt' }),
    },
  },
});

// Keys cannot be changed in a running provider; another one with the same memory takes its place.
const start = () => {
  instance = new Provider(process.env.ISSUER, configuration({ keys: [newKey()] }));
  handle = instance.callback();
};

const body = async (request) => {
  const parts = [];
  for await (const part of request) parts.push(part);
  return Buffer.concat(parts).toString();
};

const consent = async (request, response, found) => {
  const grant = new instance.Grant({ accountId: found.session.accountId, clientId: found.params.client_id });
  grant.addOIDCScope('openid profile groups');
  grant.addResourceScope('https://penstock.test', 'openid profile groups');
  const grantId = await grant.save();
  await instance.interactionFinished(request, response, { consent: { grantId } }, { mergeWithLastSubmission: true });
};

const interact = async (request, response) => {
  const found = await instance.interactionDetails(request, response);
  if (found.prompt.name === 'consent') return consent(request, response, found);
  if (request.method === 'GET') {
    response.setHeader('content-type', 'text/html');
    return response.end(`<form method="post" action="${request.url}"><input name="login"></form>`);
  }
  const accountId = new URLSearchParams(await body(request)).get('login');
  if (accountId === 'nobody') {
    return instance.interactionFinished(request, response, { error: 'access_denied', error_description: 'no' });
  }
  return instance.interactionFinished(request, response, { login: { accountId } });
};

const test = {
  '/test/rotate': start,
  '/test/groups': (text) => { const { person, of } = JSON.parse(text); groups.set(person, of); },
};

start();
createServer(async (request, response) => {
  try {
    if (request.url in test) {
      test[request.url](await body(request));
      response.end();
    } else if (request.url.startsWith('/interaction/')) {
      await interact(request, response);
    } else {
      await handle(request, response);
    }
  } catch (error) {
    response.statusCode = 500;
    response.end(String(error));
  }
}).listen(Number(new URL(process.env.ISSUER).port), '127.0.0.1', () => console.log('ready'));
